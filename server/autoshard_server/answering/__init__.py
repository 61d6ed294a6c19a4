"""What is asked, and the service that answers it or makes a job of it."""
