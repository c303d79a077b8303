//! The lab's own promises: real servers that belong to their test, networks that keep their shape, comparisons that see
//! a difference.
#![allow(clippy::unwrap_used)]

mod network;
mod servers;
