//! Primaries: which of them a reader believes a source about, who may be given the server's password, and where the
//! primary is at this moment, as the Sentinels say.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_process::exit::Failure;
use remora_protocol::Announce;
use remora_server::HostPort;
use remora_server::sentinel::Sentinels;

// Which primary may be given the password of the replica's server.
//
// The source names the primary. Each holder of the token can pose as a source, and could name an address where it
// listens itself: both the preflight and, at the hand-off, the server send `masterauth` there. So a server with a
// password follows only a primary for which something other than the source's word speaks: `--expect-primary`, proof
// that the source is the right one, what the server followed before, the address at which the operator expects the
// source, or the Sentinels that the operator names.

/// What is known about the primary without the source's word.
#[derive(Clone, Debug)]
pub struct KnownPrimaries {
    /// `--expect-primary`. No other primary is followed if there are any.
    pub expected: Vec<HostPort>,
    /// The source has proved by a key or a certificate that it is the right one, or Sentinels name the primary.
    pub is_vouched_for: bool,
    /// The source's host on the command line, and its address.
    pub source: (String, IpAddr),
    /// What the server followed before the sync.
    pub followed: Option<(String, u16)>,
}

/// What a primary may be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The server's password, if it has one.
    Password,
    /// No password. The text says why.
    NoPassword(String),
}

impl KnownPrimaries {
    /// Whether a source with this host name or address, reached at that address, may name that primary.
    ///
    /// # Errors
    /// `--expect-primary` names others.
    pub fn expects(&self, (name, source): (&str, IpAddr), primary: &Announce) -> Result<(), String> {
        if self.expected.is_empty() {
            return Ok(());
        }
        let host = match primary.host.as_str() {
            // The source's own host. Its address may have changed, but a host that was named by one has not.
            "" if name.parse::<IpAddr>().is_ok() => name.to_owned(),
            "" => source.to_string(),
            host => host.to_owned(),
        };
        self.trust(&host, primary.port).map(|_| ())
    }

    /// What the primary at this address may be given.
    ///
    /// # Errors
    /// It must not be followed, with or without a password.
    pub fn trust(&self, host: &str, port: u16) -> Result<Trust, String> {
        let named = HostPort { host: host.to_owned(), port };
        if !self.expected.is_empty() {
            if self.expected.iter().any(|expected| expected.port == port && is_same_host(&expected.host, host)) {
                return Ok(Trust::Password);
            }
            let expected = self.expected.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(format!(
                "the source names {named} as the primary, and --expect-primary names {expected}: correct the one or the other, and do \
                 not trust this source before"
            ));
        }
        let (source_host, source_address) = &self.source;
        let is_at_the_source = is_same_host(source_host, host) || is_same_host(&source_address.to_string(), host);
        let is_followed =
            self.followed.as_ref().is_some_and(|(followed, at)| *at == port && is_same_host(followed, host));
        if self.is_vouched_for || is_at_the_source || is_followed {
            return Ok(Trust::Password);
        }
        Ok(Trust::NoPassword(format!(
            "the source names {named} as the primary, which the server does not follow now and which is not the source's own address, \
             so a source that lies could get the server's password (masterauth) there: give --expect-primary {named} if that is the \
             primary, or --source-key"
        )))
    }
}

/// Whether both texts are the same address or the same name. Names are not resolved: who controls one can change what
/// it leads to after the check.
fn is_same_host(one: &str, other: &str) -> bool {
    match (one.parse::<IpAddr>(), other.parse::<IpAddr>()) {
        (Ok(one), Ok(other)) => one.to_canonical() == other.to_canonical(),
        _ => one.eq_ignore_ascii_case(other),
    }
}

// Finding: where the primary is at this moment, as the Sentinels say.
//
// A fail-over can come at any moment of a sync. So the agent asks again before each hand-off, and the server is told
// the address exactly as Sentinel writes it: with any other text Sentinel would point the server there again.

/// How old the answer may be that the server is handed over by. The primary was asked meanwhile whether it continues
/// the server, which takes milliseconds.
const FRESH: Duration = Duration::from_secs(1);

/// Finds the primary. It is cheap to clone, and all clones know what one has found.
#[derive(Clone, Debug)]
pub struct Finding {
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
    pub async fn begin(sentinels: Sentinels) -> Result<Finding, Failure> {
        let last = sentinels.primary().await?;
        Ok(Finding { sentinels, state: Arc::new(Mutex::new(State { last, covered: None })) })
    }

    /// Those that are asked.
    pub fn sentinels(&self) -> &Sentinels {
        &self.sentinels
    }

    /// Asks the Sentinels again.
    ///
    /// # Errors
    /// None of them says where the primary is.
    pub async fn ask(&self) -> Result<HostPort, Failure> {
        let now = self.sentinels.primary().await?;
        let mut state = self.state();
        if state.last != now {
            tracing::warn!(former = %state.last, %now, "Sentinel names another primary");
            *state = State { last: now.clone(), covered: None };
        }
        Ok(now)
    }

    /// Where the primary was when it was last asked for.
    pub fn last(&self) -> HostPort {
        self.state().last.clone()
    }

    /// The primary at this address would continue the server.
    pub fn covered(&self, at: &HostPort) {
        let mut state = self.state();
        if state.last == *at {
            state.covered = Some(Instant::now());
        }
    }

    /// Where to point the server now.
    ///
    /// # Errors
    /// None of the Sentinels says where the primary is.
    pub async fn for_the_hand_off(&self) -> Result<HostPort, Failure> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn known() -> KnownPrimaries {
        KnownPrimaries {
            expected: Vec::new(),
            is_vouched_for: false,
            source: ("db1".into(), "10.0.0.1".parse().unwrap()),
            followed: Some(("10.0.0.7".into(), 6379)),
        }
    }

    fn gets_the_password(known: &KnownPrimaries, host: &str, port: u16) -> bool {
        known.trust(host, port) == Ok(Trust::Password)
    }

    #[test]
    fn the_password_is_for_the_sources_address_and_for_what_the_server_followed_before_only() {
        let known = known();
        for (host, port) in [("db1", 1), ("DB1", 6379), ("10.0.0.1", 6379), ("::ffff:10.0.0.1", 1), ("10.0.0.7", 6379)]
        {
            assert!(gets_the_password(&known, host, port), "{host}:{port}");
        }
        for (host, port) in [("10.0.0.7", 6380), ("10.0.0.2", 6379), ("db2", 6379), ("db1.example", 6379), ("", 1)] {
            let Ok(Trust::NoPassword(why)) = known.trust(host, port) else { panic!("{host}:{port}") };
            assert!(why.contains(&format!("--expect-primary {host}:{port}")), "{why}");
        }
    }

    #[test]
    fn a_source_that_proved_who_it_is_may_name_any_primary() {
        let known = KnownPrimaries { is_vouched_for: true, ..known() };
        assert!(gets_the_password(&known, "elsewhere", 6379));
    }

    #[test]
    fn with_expect_primary_no_other_primary_is_followed_whatever_else_speaks_for_it() {
        let expected = vec!["[fd00::1]:6379".parse().unwrap(), "db9:6390".parse().unwrap()];
        let known = KnownPrimaries { expected, is_vouched_for: true, ..known() };
        assert!(gets_the_password(&known, "fd00:0:0::1", 6379) && gets_the_password(&known, "db9", 6390));
        for (host, port) in [("db9", 6379), ("db1", 6379), ("10.0.0.7", 6379)] {
            let why = known.trust(host, port).unwrap_err();
            assert!(why.contains("[fd00::1]:6379, db9:6390") && why.contains(&format!("{host}:{port}")), "{why}");
        }
    }
}
