//! The conformance suite: one set of tests for all transports.
//!
//! `suite` says what must be true, by means of the traits only; `harness` is what a transport provides, and helpers;
//! the other modules are the transports. A new one is a new file with a [`Harness`](harness::Harness) and one line.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod harness;
mod suite;

mod shm;
mod sim;
mod tcp;
#[cfg(feature = "verbs")]
mod verbs;
