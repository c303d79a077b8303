//! Simulation of whole syncs.
#![allow(dead_code)]

mod oracle;
mod server;
mod wire;
