"""What is learned and foretold: answer lengths, prompt tokens, prefix cache, step and transfer times, load in
flight.
"""
