//! Finding: where the primary is at this moment, as the Sentinels say.
//!
//! A fail-over can come at any moment of a sync. So the agent asks again before each hand-off, and the server is told
//! the address exactly as Sentinel writes it: with any other text Sentinel would point the server there again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::args::HostPort;
use crate::exit::Failure;
use crate::sentinel::Sentinels;

/// How old the answer may be that the server is handed over by. The primary was asked meanwhile whether it continues
/// the server, which takes milliseconds.
const FRESH: Duration = Duration::from_secs(1);

/// Finds the primary. It is cheap to clone, and all clones know what one has found.
#[derive(Clone, Debug)]
pub(super) struct Finding {
    sentinels: Sentinels,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Where the primary was when it was last asked for.
    last: HostPort,
    /// When the primary there said that it would continue the server.
    covered: Option<Instant>,
}

impl Finding {
    /// Asks the Sentinels for the first time.
    ///
    /// # Errors
    /// None of them says where the primary is.
    pub(super) async fn begin(sentinels: Sentinels) -> Result<Finding, Failure> {
        let last = sentinels.primary().await?;
        Ok(Finding { sentinels, state: Arc::new(Mutex::new(State { last, covered: None })) })
    }

    pub(super) fn sentinels(&self) -> &Sentinels {
        &self.sentinels
    }

    /// Asks the Sentinels again.
    ///
    /// # Errors
    /// None of them says where the primary is.
    pub(super) async fn ask(&self) -> Result<HostPort, Failure> {
        let now = self.sentinels.primary().await?;
        let mut state = self.state();
        if state.last != now {
            tracing::warn!(former = %state.last, %now, "Sentinel names another primary");
            *state = State { last: now.clone(), covered: None };
        }
        Ok(now)
    }

    /// Where the primary was when it was last asked for.
    pub(super) fn last(&self) -> HostPort {
        self.state().last.clone()
    }

    /// The primary at this address would continue the server.
    pub(super) fn covered(&self, at: &HostPort) {
        let mut state = self.state();
        if state.last == *at {
            state.covered = Some(Instant::now());
        }
    }

    /// Where to point the server now.
    ///
    /// # Errors
    /// None of the Sentinels says where the primary is.
    pub(super) async fn for_the_hand_off(&self) -> Result<HostPort, Failure> {
        let covered = {
            let state = self.state();
            state.covered.filter(|at| at.elapsed() < FRESH).map(|_| state.last.clone())
        };
        match covered {
            Some(at) => Ok(at),
            None => self.ask().await,
        }
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
