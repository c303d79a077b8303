//! Budget: the memory of a server that copies may take.

use std::sync::{Arc, Mutex, PoisonError};

use crate::wire::Used;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Budget {
    left: Mutex<u64>,
    most: u64,
}

/// A part of the budget, until dropped.
#[derive(Debug)]
pub(super) struct Grant {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(bytes: u64) -> Arc<Budget> {
        Arc::new(Budget { left: Mutex::new(bytes), most: bytes })
    }

    /// Takes a part, if so much is left.
    pub(super) fn take(self: &Arc<Budget>, bytes: u64) -> Option<Grant> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(bytes)?;
        Some(Grant { budget: Arc::clone(self), bytes })
    }

    /// How much of it was taken.
    pub(super) fn used(&self) -> Used {
        let left = *self.left.lock().unwrap_or_else(PoisonError::into_inner);
        Used { bytes: self.most - left, most: self.most }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        *self.budget.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_missing_until_it_is_dropped() {
        let budget = Budget::new(10);
        let grant = budget.take(8);
        assert!(grant.is_some() && budget.take(3).is_none());
        assert_eq!(budget.used(), Used { bytes: 8, most: 10 });
        drop(grant);
        assert!(budget.take(10).is_some());
    }
}
