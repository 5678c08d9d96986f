"""The web page in headless Chromium; a package, so that the browser is gone with its last test."""
