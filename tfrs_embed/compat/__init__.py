"""TensorFlow, Keras and Python as they are, and nothing about embeddings.

Private API (`private_tensorflow`, `private_keras_3`), both versions of Keras,
distribution strategies, graphs, and helpers of all other packages.
"""
