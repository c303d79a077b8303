//! Metrics: what a backup shows to those who watch it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::manifest::Manifest;
use super::moment::Moment;
use crate::metrics::register as all;
use crate::metrics::{Families, Scrapes};

/// What has been seen. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// When the snapshot of the newest whole backup was taken, and its bytes.
    newest: Option<(Moment, u64)>,
    /// Whether another one arrives.
    is_beginning: bool,
    /// The commands that are recorded.
    recorded: Option<Arc<Recorded>>,
}

/// How far the commands are. The thread that records them writes it.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// The byte of the stream that is needed next.
    pub(super) next_byte: AtomicU64,
    /// The last second that was noted.
    pub(super) noted: AtomicU64,
    /// Whether they are being read from the source.
    pub(super) is_reading: AtomicBool,
}

impl Seen {
    /// What those who ask are shown from now on.
    pub(super) fn shown_to(scrapes: &mut Scrapes) -> Seen {
        let seen = Seen::default();
        let shown = seen.clone();
        scrapes.always(move |families| shown.show(families));
        seen
    }

    /// There is this whole backup. An older one than the newest changes nothing.
    pub(super) fn has(&self, manifest: &Manifest) {
        let mut state = self.state();
        let found = (manifest.taken_seconds, manifest.bytes);
        state.newest = state.newest.max(Some(found));
    }

    pub(super) fn begins(&self, is_beginning: bool) {
        self.state().is_beginning = is_beginning;
    }

    /// The commands that are recorded from now on.
    pub(super) fn records(&self, recorded: Option<&Arc<Recorded>>) {
        self.state().recorded = recorded.cloned();
    }

    fn show(&self, families: &mut Families) {
        let state = self.state();
        if let Some((taken, bytes)) = state.newest {
            families.number(&all::BACKUP_TAKEN, taken.get());
            families.number(&all::BACKUP_BYTES, bytes);
        }
        families.whether(&all::BACKUP_BEGINNING, state.is_beginning);
        if let Some(recorded) = &state.recorded {
            families.whether(&all::BACKUP_SOURCE_UP, recorded.is_reading.load(Relaxed));
            families.number(&all::BACKUP_RECORDED, recorded.next_byte.load(Relaxed).saturating_sub(1));
            families.number(&all::BACKUP_NOTED, recorded.noted.load(Relaxed));
        }
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
