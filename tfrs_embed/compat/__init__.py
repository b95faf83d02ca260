"""TensorFlow, Keras and Python as they are, and nothing about embeddings.

Private API (`private_tensorflow`, `private_keras_3`), the two Kerases,
distribution strategies, graphs, and helpers of all other packages.
"""
