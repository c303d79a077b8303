//! The benchmark programs as processes: figures exist and are complete.
#![allow(clippy::unwrap_used)]

mod charts;
mod messenger;
mod rdma;
mod smoke;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The processors. Several tests run at the same time, and what some of them assert is only true if no other one does.
static MACHINE: RwLock<()> = RwLock::new(());

/// For a test that bears other tests beside it.
fn beside_others() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(PoisonError::into_inner)
}

/// For a test whose result depends on the processors that it gets.
fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}
