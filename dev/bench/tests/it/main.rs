//! The benchmark programs as processes: figures exist and are complete.
#![allow(clippy::unwrap_used)]

mod charts;
mod smoke;
