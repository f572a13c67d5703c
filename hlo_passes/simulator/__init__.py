"""What a module takes in seconds: costs of instructions, a timeline, and bounds below it."""
