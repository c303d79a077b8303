//! Guide: takes the server along to another primary where no Sentinel does.
//!
//! Sentinel finds replicas in the primary's `INFO`, and takes those along that it knows. A server that takes its
//! first copy through the agent is not there before it goes on at its primary. If the primary dies meanwhile, the
//! server would ask the dead one for ever.
//!
//! ```text
//!   link down for ASTRAY_LIMIT, to a former primary of the group, which the Sentinels name no more
//!      a Sentinel knows the server: it is Sentinel's      otherwise: REPLICAOF the primary that they name
//! ```
//!
//! This is the only command by which `remora attend` changes its server.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::passage::Gate;
use crate::control::{Control, Expected, NotOurs};
use remora_process::AbortOnDrop;
use remora_process::exit::Failure;
use remora_server::HostPort;
use remora_server::sentinel::{self, KnownReplica, Sentinels};
use remora_server::{Facts, Link, RefusalKind, Server, ServerError, ServerUrl};

/// Interval at which the Sentinels are asked which servers there are.
const GROUP_EVERY: Duration = Duration::from_secs(2);

/// How long the server's link must be down while the Sentinels name another primary. Sentinel corrects the replicas
/// that it knows within seconds.
pub(crate) const ASTRAY_LIMIT: Duration = Duration::from_secs(5);

/// How long a name may take to be looked up.
const LOOKUP_LIMIT: Duration = Duration::from_secs(1);

/// What the Sentinels say of the group.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) primary: HostPort,
    pub(crate) replicas: Vec<KnownReplica>,
    /// The primaries that they have named before.
    pub(crate) former: Vec<HostPort>,
}

impl Group {
    pub(super) async fn ask(sentinels: &Sentinels) -> Result<Group, Failure> {
        let (primary, replicas) = (sentinels.primary().await?, sentinels.replicas().await?);
        Ok(Group { primary, replicas, former: Vec::new() })
    }

    /// The ports of all servers: each of them can be the server's primary in a moment.
    pub(super) fn ports(&self) -> BTreeSet<u16> {
        let replicas = self.replicas.iter().filter_map(|replica| Some(replica.address.as_ref()?.port));
        std::iter::once(self.primary.port).chain(replicas).collect()
    }

    /// What they say now, with what is known from before.
    pub(crate) fn follows(self, before: &Group) -> Group {
        let mut former = before.former.clone();
        if !former.contains(&before.primary) {
            former.push(before.primary.clone());
        }
        former.retain(|at| *at != self.primary);
        Group { former, ..self }
    }

    /// Whether the server waits for a former primary, and no Sentinel looks after it. `addresses`: those
    /// of the host that it follows.
    pub(crate) fn is_astray(&self, server: &Facts, url: &ServerUrl, addresses: &[IpAddr]) -> bool {
        if remora_base::mutation::Mutation::AstrayLeft.is_active() {
            return false;
        }
        let Some(link) = server.link.as_ref().filter(|link| is_down(link)) else { return false };
        let is_there = |at: &HostPort| {
            let is_host = at.host == link.host || at.host.parse().is_ok_and(|ip| addresses.contains(&ip));
            at.port == link.port && is_host
        };
        let is_former = || self.former.iter().any(is_there);
        // One that was replaced before the agent began.
        let is_dead = || {
            let dead =
                |replica: &KnownReplica| replica.flags.contains("down") || replica.flags.contains("disconnected");
            self.replicas.iter().any(|replica| replica.address.as_ref().is_some_and(is_there) && dead(replica))
        };
        let is_known = || self.replicas.iter().any(|replica| sentinel::is_it(replica, server, url));
        server.loading != Some(true) && !is_there(&self.primary) && (is_former() || is_dead()) && !is_known()
    }
}

fn is_down(link: &Link) -> bool {
    link.up == Some(false) && link.syncing != Some(true)
}

/// Keeps the gate's ports those of the group, and tells of the group.
pub(super) fn follow(sentinels: Sentinels, first: Group, gate: Gate) -> (Guide, AbortOnDrop) {
    let (tell, group) = watch::channel(first);
    let task = tokio::spawn(async move {
        let mut due = interval(GROUP_EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            match Group::ask(&sentinels).await {
                Ok(now) => {
                    gate.set_ports(now.ports());
                    tell.send_modify(|group| *group = now.follows(group));
                }
                Err(failure) => tracing::debug!("{failure}"),
            }
        }
    });
    (Guide { group, astray_since: None, is_warned: false }, AbortOnDrop::new(&task))
}

/// What the Sentinels say of the group now. Clones are about the same group.
#[derive(Clone)]
pub(crate) struct Watcher(watch::Receiver<Group>);

impl Watcher {
    /// Whether the server waits for a primary that was replaced, and no Sentinel looks after it.
    pub(crate) async fn is_astray(&self, server: &Facts, url: &ServerUrl) -> bool {
        let group = self.0.borrow().clone();
        match server.link.as_ref().filter(|link| is_down(link)) {
            Some(link) => group.is_astray(server, url, &addresses(link).await),
            None => false,
        }
    }
}

/// Looks after one server.
pub(super) struct Guide {
    group: watch::Receiver<Group>,
    /// Since when the server waits for a server that is no longer a primary.
    astray_since: Option<Instant>,
    is_warned: bool,
}

impl Guide {
    pub(super) fn watcher(&self) -> Watcher {
        Watcher(self.group.clone())
    }

    /// Looks at the server, and points it at the group's primary if it waits for a former one and no Sentinel looks
    /// after it. Returns whether it was pointed there.
    pub(super) async fn look(&mut self, server: &Server) -> bool {
        let group = self.group.borrow().clone();
        let looked = async {
            let mut client = server.connect().await?;
            let facts = Facts::read(&mut client).await?;
            Ok::<_, ServerError>((client, facts))
        };
        let (client, facts) = match looked.await {
            Ok(looked) => looked,
            Err(error) => {
                tracing::debug!("{error}");
                return false;
            }
        };
        let is_astray = self.watcher().is_astray(&facts, server.url()).await;
        let Some(link) = facts.link.clone().filter(|_| is_astray) else {
            self.astray_since = None;
            return false;
        };
        if self.astray_since.get_or_insert_with(Instant::now).elapsed() < ASTRAY_LIMIT {
            return false;
        }
        let former = [(link.host.as_str(), link.port)];
        let primary = (group.primary.host.as_str(), group.primary.port);
        let mut control = Control::new(server.clone(), client);
        let may = |now: &Facts| now.link.as_ref().is_some_and(is_down);
        let pointed = control.follow_if(primary, Expected::OneOf(&former), may).await;
        match pointed {
            Ok(true) => {
                tracing::warn!(
                    former = %format_args!("{}:{}", link.host, link.port), now = %group.primary,
                    "the server's primary was replaced, and no Sentinel knows the server: it was pointed at the new primary"
                );
                (self.astray_since, self.is_warned) = (None, false);
                return true;
            }
            Ok(false) => {}
            Err(NotOurs::TakenOver(how)) => tracing::info!("the server {how}: it is left as it is"),
            Err(NotOurs::Unknown(error)) if !std::mem::replace(&mut self.is_warned, true) => {
                let rule = match &error {
                    ServerError::Refused { kind: RefusalKind::NoPerm, .. } => {
                        "; remora attend with --sentinel needs +replicaof there"
                    }
                    _ => "",
                };
                tracing::warn!(
                    "the server waits for a former primary, and could not be pointed at {}: {error}{rule}",
                    group.primary
                );
            }
            Err(NotOurs::Unknown(_)) => {}
        }
        self.astray_since = None;
        false
    }

    /// Looks at a server that a run leaves behind, until its link is up, it was pointed at another primary, or it is
    /// clear that it waits for none that was replaced. Returns whether it was pointed at another one.
    pub(super) async fn look_to_the_end(&mut self, server: &Server) -> bool {
        let until = Instant::now() + ASTRAY_LIMIT + GROUP_EVERY * 2;
        while Instant::now() < until {
            if self.look(server).await {
                return true;
            }
            tokio::time::sleep(GROUP_EVERY / 4).await;
        }
        false
    }
}

/// The addresses of the host that a server follows. Sentinel mostly writes addresses, and operators names.
async fn addresses(link: &Link) -> Vec<IpAddr> {
    let found = tokio::time::timeout(LOOKUP_LIMIT, tokio::net::lookup_host((link.host.as_str(), link.port))).await;
    match found {
        Ok(Ok(found)) => found.map(|address| address.ip()).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn at(text: &str) -> HostPort {
        text.parse().unwrap()
    }

    fn replica(address: &str, flags: &str) -> KnownReplica {
        KnownReplica { address: Some(at(address)), run_id: String::new(), flags: flags.into(), priority: 100 }
    }

    /// After a fail-over from 10.0.0.1 to 10.0.0.2.
    fn group() -> Group {
        let before =
            Group { primary: at("10.0.0.1:6379"), replicas: vec![replica("10.0.0.2:6379", "slave")], former: vec![] };
        let now =
            Group { primary: at("10.0.0.2:6379"), replicas: vec![replica("10.0.0.1:6379", "slave")], former: vec![] };
        now.follows(&before)
    }

    fn following(host: &str, up: bool) -> Facts {
        let link = Link { host: host.into(), port: 6379, up: Some(up), syncing: Some(false) };
        Facts { link: Some(link), ..Facts::default() }
    }

    fn is_astray(group: &Group, server: &Facts, addresses: &[&str]) -> bool {
        let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        group.is_astray(server, &"redis://10.0.0.9:6379".parse().unwrap(), &addresses)
    }

    #[test]
    fn a_server_that_waits_for_a_former_primary_is_astray() {
        assert!(is_astray(&group(), &following("10.0.0.1", false), &[]));
        assert!(is_astray(&group(), &following("db-0.example.net", false), &["10.0.0.7", "10.0.0.1"]), "by its name");
        assert!(!is_astray(&group(), &following("10.0.0.1", true), &[]), "it came back as a replica");
        assert!(!is_astray(&group(), &following("10.0.0.2", false), &[]), "the present one is away");
        assert!(!is_astray(&group(), &following("db-1", false), &["10.0.0.2"]), "the present one, by its name");
        assert!(!is_astray(&group(), &following("10.0.0.3", false), &[]), "an operator's choice");
        assert!(!is_astray(&group(), &Facts::default(), &[]), "it follows none");
        let loading = Facts { loading: Some(true), ..following("10.0.0.1", false) };
        assert!(!is_astray(&group(), &loading, &[]));
    }

    #[test]
    fn a_server_that_sentinel_knows_is_sentinels() {
        let mut group = group();
        group.replicas.push(replica("10.0.0.9:6379", "slave"));
        assert!(!is_astray(&group, &following("10.0.0.1", false), &[]));
    }

    #[test]
    fn a_primary_that_was_replaced_before_the_agent_began_is_known_by_its_flags() {
        let began = |flags| Group { former: vec![], replicas: vec![replica("10.0.0.1:6379", flags)], ..group() };
        assert!(is_astray(&began("slave,s_down,disconnected"), &following("10.0.0.1", false), &[]));
        assert!(!is_astray(&began("slave"), &following("10.0.0.1", false), &[]), "a chain that an operator made");
    }

    #[test]
    fn a_primary_that_came_back_to_its_place_is_no_former_one() {
        let back = Group { primary: at("10.0.0.1:6379"), replicas: vec![], former: vec![] }.follows(&group());
        assert_eq!(back.former, [at("10.0.0.2:6379")]);
        assert_eq!(back.ports(), BTreeSet::from([6379]));
    }
}
