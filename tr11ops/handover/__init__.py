"""What happened in a shift, told to the next one."""
