"""Runs for hours, by hand: ``cd integration_tests; python -m robustness NAME``. Short ones are tests (test_robustness.py)."""
