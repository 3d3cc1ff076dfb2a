"""The papers' tables and figures: their plans, their runs, and our numbers beside the papers'."""
