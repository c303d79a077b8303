//! A network inside one process, driven by a seed. To be written.
