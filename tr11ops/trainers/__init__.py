"""Any trainer, operated unchanged: started, heard, held and ended as its dialect says."""
