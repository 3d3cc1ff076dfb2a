"""Tuning: successive halving of candidates drawn from boxes, each rung one program, its batches here or spread over workers."""
