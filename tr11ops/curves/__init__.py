"""The course of a training's numbers: read from any log, judged, laid beside another's."""
