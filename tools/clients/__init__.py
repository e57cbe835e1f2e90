"""Other people's programs, unmodified, on stock torch and under the overlay: what differs (tools/run_clients.py)."""
