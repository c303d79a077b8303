//! Captured: the server that a source captures, which `--sentinel` leaves to the Sentinels.
//!
//! ```text
//!   --server URL                        always that server
//!   --sentinel …        every second:   where is the primary?            announced to the replicas
//!                                       is our server still suitable?    no: another one of the group
//! ```
//!
//! All servers of a group have one history and the same offsets, so the stream goes on at another server where it broke
//! at the former one. After a promotion the history is another one, and the source does what it does for every such
//! change. What is captured *now* is written here, and read by the loop, by the questions to the server, and by a
//! capture when it begins or resumes the stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::{Incoming, Source};
use crate::options::{Beside, Target};
use remora_process::AbortOnDrop;
use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_server::sentinel::Sentinels;
use remora_server::sentinel::{self, Candidate};
use remora_server::{Facts, HostPort, Role, Server};

/// How often the Sentinels and the server are asked. A fail-over takes some seconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a server may be away, load, or be without its primary before another one takes its place. A restart of a
/// small server, or a short break of the network, is over sooner.
const PATIENCE: Duration = Duration::from_secs(5);

/// The server that a source captures. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct Captured {
    present: Arc<Mutex<Present>>,
    group: Option<Arc<Group>>,
}

/// What is captured now.
struct Present {
    server: Server,
    /// Where the primary is, as Sentinel writes it.
    primary: Option<HostPort>,
}

/// How to find another server.
struct Group {
    sentinels: Sentinels,
    beside: Beside,
    /// The login and the TLS options for each of its servers.
    like: Server,
}

impl Captured {
    /// Finds the server to capture.
    ///
    /// # Errors
    /// No Sentinel answers, or no server is suitable.
    pub(super) async fn find(target: &Target) -> Result<Captured, Failure> {
        let (sentinels, beside, open) = match target {
            Target::Server(server) => return Ok(Captured::always(server.clone())),
            Target::Group { sentinels, beside, open } => (sentinels.clone(), *beside, open),
        };
        let primary = sentinels.primary().await?;
        let group = Group { sentinels, beside, like: open(&primary)? };
        let server = match group.beside {
            Beside::Primary => group.like.clone(),
            Beside::Replica => sentinel::least_behind(&group.sentinels, &group.like).await?.server,
        };
        tracing::info!(server = %server.url(), %primary, name = group.sentinels.name(), "found by the Sentinels");
        let present = Present { server, primary: Some(primary) };
        Ok(Captured { present: Arc::new(Mutex::new(present)), group: Some(Arc::new(group)) })
    }

    /// This server and no other.
    pub(crate) fn always(server: Server) -> Captured {
        Captured { present: Arc::new(Mutex::new(Present { server, primary: None })), group: None }
    }

    /// The server that is captured now.
    pub(crate) fn server(&self) -> Server {
        self.present().server.clone()
    }

    /// Where the primary is, as Sentinel has written it last.
    pub(super) fn primary(&self) -> Option<HostPort> {
        self.present().primary.clone()
    }

    /// The server to begin a snapshot with: one that was promoted since the last look is left to its clients, if a
    /// replica can take its place.
    pub(super) async fn for_a_snapshot(&self) -> Server {
        if let Some(group) = &self.group
            && let Ok(facts) = sentinel::look(&self.server()).await
            && group.is_misplaced(&facts)
            && let Some(candidate) = group.another(None).await
        {
            self.present().server = candidate.server;
        }
        self.server()
    }

    /// Looks after the group until the handle is dropped, and tells the loop of each change. `None` without Sentinels.
    pub(super) fn watch(&self, tell: Sender<Incoming>) -> Option<AbortOnDrop> {
        let group = self.group.clone()?;
        let watch = Watch { captured: self.clone(), group, told: self.server(), unwell_since: None, is_warned: false };
        Some(AbortOnDrop::new(&tokio::spawn(watch.run(tell))))
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Whether the server has a role that the source is not to sit beside.
    fn is_misplaced(&self, facts: &Facts) -> bool {
        match self.beside {
            Beside::Replica => facts.role == Some(Role::Primary),
            Beside::Primary => facts.role == Some(Role::Replica),
        }
    }

    /// Another server to sit beside, if there is one. `primary`: where it is, if that was just asked.
    async fn another(&self, primary: Option<HostPort>) -> Option<Candidate> {
        let found = match self.beside {
            Beside::Replica => sentinel::least_behind(&self.sentinels, &self.like).await.map_err(Failure::from),
            Beside::Primary => self.at_the_primary(primary).await,
        };
        found.inspect_err(|failure| tracing::debug!("{failure}")).ok()
    }

    async fn at_the_primary(&self, primary: Option<HostPort>) -> Result<Candidate, Failure> {
        let address = match primary {
            Some(primary) => primary,
            None => self.sentinels.primary().await?,
        };
        let server = self.like.at(&address.host, address.port);
        let facts = sentinel::look(&server).await?;
        match self.is_misplaced(&facts) {
            true => Err(Failure::passing(Code::Server, format!("{address} is not a primary yet"))),
            false => Ok(Candidate { address, server, facts }),
        }
    }
}

/// Another server of the group is captured from now on.
pub(super) fn moved(source: &mut Source, facts: Facts) {
    source.facts = facts;
    // Questions under way keep the former connection.
    source.questions.client = Arc::default();
    source.questions.pins = Arc::default();
    source.learn();
}

/// The task that looks after a group.
struct Watch {
    captured: Captured,
    group: Arc<Group>,
    /// The server that the loop knows of.
    told: Server,
    /// Since when the server is away or out of step.
    unwell_since: Option<Instant>,
    /// Whether a warning says that no other server can take its place.
    is_warned: bool,
}

impl Watch {
    async fn run(mut self, tell: Sender<Incoming>) {
        let mut due = tokio::time::interval(LOOK_EVERY);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let primary = self.ask_for_the_primary().await;
            let moved = self.look(primary).await;
            if let Some(facts) = moved
                && tell.send(Incoming::Moved(Box::new(facts))).await.is_err()
            {
                return;
            }
        }
    }

    async fn ask_for_the_primary(&self) -> Option<HostPort> {
        let primary = match self.group.sentinels.primary().await {
            Ok(primary) => primary,
            Err(error) => {
                tracing::debug!("{error}");
                return None;
            }
        };
        let former = self.captured.present().primary.replace(primary.clone());
        if let Some(former) = former.filter(|former| *former != primary) {
            tracing::warn!(%former, now = %primary, "Sentinel names another primary");
        }
        Some(primary)
    }

    /// Looks at the server. Returns the facts of another one that has taken its place.
    async fn look(&mut self, primary: Option<HostPort>) -> Option<Facts> {
        let server = self.captured.server();
        let facts = sentinel::look(&server).await;
        // A capture has found it out before.
        if server.url() != self.told.url()
            && let Ok(facts) = facts
        {
            self.say_moved(&server);
            return Some(facts);
        }
        let why = match &facts {
            Ok(facts) if self.group.is_misplaced(facts) => match self.group.beside {
                Beside::Replica => "it was promoted".to_owned(),
                Beside::Primary => "it is a replica now".to_owned(),
            },
            other => {
                let unwell = match (other, self.group.beside) {
                    (Err(error), _) => Some(error.to_string()),
                    (Ok(facts), Beside::Replica) => sentinel::suits(facts).err(),
                    (Ok(_), Beside::Primary) => None,
                };
                let Some(unwell) = unwell else {
                    (self.unwell_since, self.is_warned) = (None, false);
                    return None;
                };
                if self.unwell_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                    return None;
                }
                unwell
            }
        };
        match self.group.another(primary).await {
            Some(found) if found.server.url() != server.url() => {
                tracing::warn!(server = %server.url(), "{why}");
                self.captured.present().server = found.server.clone();
                self.say_moved(&found.server);
                Some(found.facts)
            }
            _ => {
                if !std::mem::replace(&mut self.is_warned, true) {
                    let sits = server.url();
                    tracing::warn!(server = %sits, "{why}, and no other server of the group can take its place yet");
                }
                None
            }
        }
    }

    fn say_moved(&mut self, server: &Server) {
        tracing::warn!(event = events::SOURCE_MOVED, from = %self.told.url(), to = %server.url(), "the source captures another server of the group");
        (self.unwell_since, self.is_warned, self.told) = (None, false, server.clone());
    }
}
