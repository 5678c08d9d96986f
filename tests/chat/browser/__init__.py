"""The web page in headless Chromium."""
