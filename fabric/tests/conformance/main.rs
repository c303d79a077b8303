//! What no transport may fail: one suite of sentences, held against each of them.
//!
//! `suite` says what must be true, knowing nothing but the traits; `harness` is what a transport brings along and the help that the
//! sentences need; the other modules are the transports. A new one is a new file with a [`Harness`](harness::Harness) and one line.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod harness;
mod suite;

mod shm;
mod sim;
mod tcp;
#[cfg(feature = "verbs")]
mod verbs;
