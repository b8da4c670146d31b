"""The Grafana dashboard: its panels, the JSON made of them, and a picture of them under a real load."""
