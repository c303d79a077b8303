//! Look: what both servers must be before a switch. Nothing is changed here.

use remora_redis::info::{Info, Replica};

use super::TASK;
use super::exchange::NOWHERE;
use super::orders::{Ready, Told};
use crate::args::{HostPort, SwitchArgs};
use crate::exit::{Code, Failure};
use crate::server::own_changes::{Counted, OwnChanges};
use crate::server::permission::{Permission, TO_REPLICATE};
use crate::server::{Client, Credentials, Facts, Password, Role, Server, ServerError, Version};
use crate::units::counted;

/// The first version with a pause of writes alone.
const FIRST: Version = Version { major: 6, minor: 2, patch: 0 };

/// The channel by which Sentinels find each other: each of them subscribes to it at each server that it watches.
const SENTINELS: &str = "__sentinel__:hello";

/// What a look at both servers has found.
pub(super) enum Found {
    /// They stand as after a switch.
    Switched(Box<Ready>),
    Ready(Box<Ready>),
}

/// Looks at both servers.
///
/// # Errors
/// A server cannot be asked, or they cannot change their roles: [`Code::Refused`], with what to do.
pub(super) async fn look(args: &SwitchArgs) -> Result<Found, Failure> {
    let (from, to) = (args.ends.open_from(TASK)?, args.ends.open_to(TASK)?);
    let (mut old, mut new) = tokio::try_join!(from.connect(), to.connect())?;
    let before = old.info("").await?;
    let (of_old, of_new) = (Facts::from_info(&before), Facts::read(&mut new).await?);
    let old_follows = of_old.role == Some(Role::Replica) && follows_directly(&to, &of_new, &of_old).await;
    let standing = judge(&of_old, &of_new, old_follows);
    match &standing {
        Standing::Switched | Standing::Ready | Standing::Between => {}
        Standing::Refused(why) => {
            let text = format!("{} cannot take the place of {}: {why}", to.url(), from.url());
            return Err(Failure::refused(text));
        }
        Standing::Later(why) => {
            let text = format!("{} cannot take the place of {} now: {why}; nothing was changed", to.url(), from.url());
            return Err(Failure::new(Code::NotSwitched, text));
        }
    }
    // An old one that has stepped down need not list the new one any more.
    let named = args.to_address.clone().map(|named| (named.host, named.port));
    let direct = args.ends.to.host_and_port().map(|(host, port)| (host.to_owned(), port));
    let mut listed = named.or(direct).unwrap_or_default();
    if standing == Standing::Ready {
        if !args.sentinel.is_given() {
            refuse_sentinels(&mut old).await?;
        }
        refuse_an_inexact_replica(&mut new).await?;
        let ports = ports_of(&mut new, &of_new).await?;
        listed = match &args.to_address {
            Some(named) => named_in(&before, named),
            None => {
                let is_direct = follows_directly(&from, &of_old, &of_new).await;
                listed_in(&before, &ports, &addresses(args.ends.to.host_and_port()).await, is_direct)
            }
        }
        .map_err(|why| Failure::refused(format!("{} {why}", from.url())))?;
    }
    let others = others_in(&before, &listed);
    let own = (addresses(args.ends.from.host_and_port()).await, of_old.tcp_port);
    if let Some(given) = args.ends.to.host_and_port().filter(|_| leads_to(&listed, &own)) {
        listed = (given.0.to_owned(), given.1);
    }
    if standing == Standing::Ready {
        check_login(&mut old, &to, &of_new, &listed).await?;
    }
    let ready = Ready {
        full_copies: full_copies(new.info("stats").await),
        old: Told::new(old),
        new: Told::new(new),
        others,
        listed,
        is_between: standing == Standing::Between,
        notes_roles: args.rewrite_config,
        behind: of_old.offset.unwrap_or(0).saturating_sub(of_new.offset.unwrap_or(0)),
    };
    Ok(if standing == Standing::Switched { Found::Switched(ready.into()) } else { Found::Ready(ready.into()) })
}

/// Full copies that a server has served since its start, by its `INFO stats`.
pub(super) fn full_copies(stats: Result<Info, ServerError>) -> Option<u64> {
    stats.ok()?.number("sync_full")
}

/// How two servers stand to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Ready,
    /// As after a switch.
    Switched,
    /// The old one has stepped down, and a run has ended there.
    Between,
    /// Not without a change by someone.
    Refused(String),
    /// Not now.
    Later(String),
}

/// Decides by what the servers say of themselves. `old_follows`: the old one follows the new one, whatever its link
/// says.
pub(crate) fn judge(old: &Facts, new: &Facts, old_follows: bool) -> Standing {
    let refused = |why: &str| Standing::Refused(why.to_owned());
    let is_nowhere = old.link.as_ref().is_some_and(|link| link.host == NOWHERE);
    let same_history = old.replid.is_some() && old.replid == new.replid;
    if old.run_id.is_some() && old.run_id == new.run_id {
        return refused("both addresses lead to the same server");
    }
    if old.cluster_enabled == Some(true) || new.cluster_enabled == Some(true) {
        return refused("they are in cluster mode: send CLUSTER FAILOVER to the new one");
    }
    match (old.role, new.role) {
        (Some(Role::Primary), Some(Role::Replica)) => {}
        (Some(Role::Replica), Some(_)) if is_nowhere => return Standing::Between,
        (Some(Role::Replica), Some(Role::Primary)) if same_history || old_follows => return Standing::Switched,
        (Some(Role::Replica), _) => return refused("the old one is no primary"),
        _ => return refused("it is not its replica: make it one (remora migrate, remora replica)"),
    }
    if [old, new].into_iter().any(|facts| facts.version.is_some() && !facts.has_redis(FIRST)) {
        return refused("both must be Redis 6.2 or later, or Valkey, which can pause writes alone");
    }
    let link = new.link.as_ref();
    if new.loading == Some(true) || link.is_some_and(|link| link.syncing == Some(true)) {
        return Standing::Later("it is taking a full copy".into());
    }
    if link.is_none_or(|link| link.up != Some(true)) {
        return Standing::Later("its link to its primary is down".into());
    }
    if !same_history {
        return refused("it follows another primary");
    }
    if !new.backlog.is_some_and(|backlog| backlog.active) {
        return refused("it keeps no backlog, so the old one could not follow it without a full copy");
    }
    Standing::Ready
}

/// Sentinels would undo the switch, or promote a third server.
async fn refuse_sentinels(old: &mut Client) -> Result<(), Failure> {
    let url = old.server().url().to_string();
    match old.command(&["PUBSUB", "NUMSUB", SENTINELS]).await {
        Ok(answer) => match answer.as_array().and_then(|words| words.get(1)?.as_int()) {
            Some(count) if count > 0 => Err(Failure::refused(format!(
                "Sentinels watch {url} ({} of {SENTINELS}), and would undo the switch: name all of them with \
                 --sentinel, and the primary's name there with --sentinel-name",
                counted(count, "subscriber")
            ))),
            _ => Ok(()),
        },
        Err(error) if error.refusal().is_some() => {
            tracing::warn!("whether Sentinels watch {url} is not known ({error}); they would undo the switch");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses a replica that does not hold what its primary holds.
async fn refuse_an_inexact_replica(new: &mut Client) -> Result<(), Failure> {
    let (since_start, own) = (Counted::read(new).await?, OwnChanges::read(new).await?);
    let url = new.server().url();
    if let Some(errors) = since_start.unexpected.filter(|errors| *errors > 0) {
        return Err(Failure::refused(format!(
            "{url} could not execute {errors} of its primary's commands (unexpected_error_replies; its log names them): compare the \
             two with remora verify; if they are the same, send it CONFIG RESETSTAT, else make it a replica again"
        )));
    }
    if own.as_ref().is_some_and(|own| own.is_writable) {
        return Err(Failure::refused(format!(
            "clients may write to {url} although it is a replica (replica-read-only no): set it to yes there, and compare the two \
             with remora verify"
        )));
    }
    if let Some(keys) = since_start.evicted.filter(|keys| *keys > 0) {
        let keys = counted(keys, "key");
        tracing::warn!("{url} has removed {keys} since its start because its memory was full");
    }
    Ok(())
}

/// Whether a replica is known to follow the old primary itself, and not another one of its replicas: the address that
/// it follows leads there.
async fn follows_directly(from: &Server, old: &Facts, new: &Facts) -> bool {
    let Some(link) = &new.link else { return false };
    if from.url().host_and_port() == Some((link.host.as_str(), link.port)) {
        return true;
    }
    let asked = async { Facts::read(&mut from.at(&link.host, link.port).connect().await?).await };
    let asked: Result<Facts, ServerError> = asked.await;
    // An address that leads nowhere from here proves nothing.
    asked.is_ok_and(|facts| facts.run_id.is_some() && facts.run_id == old.run_id)
}

/// The ports under which a primary may list this server.
async fn ports_of(new: &mut Client, facts: &Facts) -> Result<Vec<u16>, Failure> {
    let announced = match new.config_get("replica-announce-port").await {
        Ok(port) => port.and_then(|port| port.parse().ok()).filter(|port| *port != 0),
        Err(error) if error.refusal().is_some() => None,
        Err(error) => return Err(error.into()),
    };
    Ok([announced, facts.tcp_port, facts.tls_port].into_iter().flatten().collect())
}

/// A host's name, and the addresses that it leads to.
async fn addresses(place: Option<(&str, u16)>) -> Vec<String> {
    let Some((host, port)) = place else { return Vec::new() };
    let found = tokio::net::lookup_host((host, port)).await.into_iter().flatten();
    found.map(|address| address.ip().to_string()).chain([host.to_owned()]).collect()
}

/// The replica with one of these ports and addresses, as its primary lists it. One that is listed with another address
/// is it if `is_direct` and there is no other: its primary may see it behind a translation of addresses.
fn listed_in(info: &Info, ports: &[u16], hosts: &[String], is_direct: bool) -> Result<(String, u16), String> {
    let with_port: Vec<Replica> = info.replicas().filter(|replica| ports.contains(&replica.port)).collect();
    let here: Vec<&Replica> = with_port.iter().filter(|replica| hosts.contains(&replica.ip)).collect();
    match (&here[..], &with_port[..]) {
        ([one], _) => Ok((one.ip.clone(), one.port)),
        ([], [one]) if is_direct => Ok((one.ip.clone(), one.port)),
        ([], [] | [_]) => Err(format!(
            "lists no replica at {hosts:?} with the port {ports:?} (INFO replication): the new one may follow another replica; if \
             it follows this one, name it with --to-address as it is listed"
        )),
        _ => Err("lists several replicas with that port: name the new one with --to-address as it is listed".into()),
    }
}

/// Whether a server that followed this address would follow itself. Two servers with one port on two addresses of one
/// host are listed so, as the kernel gives both ends of a connection on one host the same address.
fn leads_to(listed: &(String, u16), (hosts, port): &(Vec<String>, Option<u16>)) -> bool {
    hosts.contains(&listed.0) && *port == Some(listed.1)
}

/// The replicas beside that one, with what follows from that.
fn others_in(info: &Info, listed: &(String, u16)) -> Vec<String> {
    let is_other = |replica: &Replica| (replica.ip.as_str(), replica.port) != (listed.0.as_str(), listed.1);
    let named = |replica: Replica| HostPort { host: replica.ip, port: replica.port }.to_string();
    info.replicas().filter(is_other).map(named).collect()
}

/// The replica of that address, if it is one.
fn named_in(info: &Info, named: &HostPort) -> Result<(String, u16), String> {
    let is_it = |replica: &Replica| (replica.ip.as_str(), replica.port) == (named.host.as_str(), named.port);
    match info.replicas().find(is_it) {
        Some(replica) => Ok((replica.ip, replica.port)),
        None => Err(format!("lists no replica {named} (INFO replication)")),
    }
}

/// Checks that the old primary's login for replication (`masteruser`, `masterauth`) is valid at the new one. Without it
/// the old primary could not follow.
async fn check_login(old: &mut Client, to: &Server, new: &Facts, listed: &(String, u16)) -> Result<(), Failure> {
    let (user, password) = match (old.config_bytes("masteruser").await, old.config_bytes("masterauth").await) {
        (Ok(user), Ok(password)) => (user, password),
        (Err(error), _) | (_, Err(error)) if error.refusal().is_some() => {
            tracing::warn!(
                "whether {} may log in at {} to follow it is not known: it does not tell its masterauth (CONFIG GET)",
                old.server().url(),
                to.url()
            );
            return Ok(());
        }
        (Err(error), _) | (_, Err(error)) => return Err(error.into()),
    };
    let given = |value: Option<Vec<u8>>| value.filter(|value| !value.is_empty());
    let password = given(password).map(Password::new);
    let credentials = Credentials { user: given(user).filter(|_| password.is_some()), password };
    let refused = |why: String| {
        Failure::refused(format!(
            "{} could not follow {}:{}: {why}; set masteruser and masterauth there first",
            old.server().url(),
            listed.0,
            listed.1
        ))
    };
    let mut client = match to.with_login(credentials).connect().await {
        Ok(client) => client,
        Err(error) if error.refusal().is_some() => return Err(refused(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    for needed in TO_REPLICATE {
        if let Permission::Refused(error) = needed.ask(&mut client, new).await? {
            return Err(refused(error.to_string()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::{Backlog, Link};

    fn pair() -> (Facts, Facts) {
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        let of =
            |role, run_id: &str| Facts { role: Some(role), run_id: Some(run_id.into()), replid, ..Facts::default() };
        let link = Link { host: "a".into(), port: 1, up: Some(true), syncing: Some(false) };
        let backlog = Backlog { active: true, size: 1 << 20, first: 1, held: 0 };
        let new = Facts { link: Some(link), backlog: Some(backlog), ..of(Role::Replica, "new") };
        (of(Role::Primary, "old"), new)
    }

    #[test]
    fn two_servers_that_can_change_their_roles_are_told_from_others() {
        let (old, new) = pair();
        assert_eq!(judge(&old, &new, false), Standing::Ready);
        assert_eq!(judge(&new, &old, false), Standing::Switched);
        assert!(matches!(judge(&old, &old, false), Standing::Refused(why) if why.contains("same server")));
        type Change = fn(&mut Facts, &mut Facts);
        let changed: [(Change, &str); 6] = [
            (|old, _| old.cluster_enabled = Some(true), "CLUSTER FAILOVER"),
            (|_, new| new.role = Some(Role::Primary), "not its replica"),
            (|old, _| old.role = Some(Role::Replica), "no primary"),
            (|_, new| new.replid = None, "another primary"),
            (|_, new| new.backlog = None, "no backlog"),
            (|old, _| old.version = "6.0.16".parse().ok(), "6.2 or later"),
        ];
        for (change, words) in changed {
            let (mut old, mut new) = pair();
            change(&mut old, &mut new);
            assert!(matches!(judge(&old, &new, false), Standing::Refused(why) if why.contains(words)), "{words}");
        }
        for change in [|link: &mut Link| link.up = Some(false), |link: &mut Link| link.syncing = Some(true)] {
            let (old, mut new) = pair();
            change(new.link.as_mut().unwrap());
            assert!(matches!(judge(&old, &new, false), Standing::Later(_)));
        }
    }

    #[test]
    fn the_new_primary_is_found_among_the_replicas_by_its_port_and_address() {
        let info = Info::parse(
            b"slave0:ip=10.0.0.1,port=6379,state=online,offset=1,lag=0\r\nslave1:ip=10.0.0.2,port=6379,state=online,offset=1,lag=0\r\n\
              slave2:ip=10.0.0.3,port=6380,state=online,offset=1,lag=0\r\n",
        );
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>();
        assert_eq!(listed_in(&info, &[6379], &hosts(&["10.0.0.2"]), false).unwrap(), ("10.0.0.2".into(), 6379));
        assert_eq!(listed_in(&info, &[6380, 6390], &hosts(&["127.0.0.1"]), true).unwrap(), ("10.0.0.3".into(), 6380));
        assert!(listed_in(&info, &[6380], &hosts(&["127.0.0.1"]), false).unwrap_err().contains("another replica"));
        assert!(listed_in(&info, &[6379], &hosts(&["127.0.0.1"]), true).unwrap_err().contains("several"));
        assert!(listed_in(&info, &[7000], &hosts(&["10.0.0.1"]), true).unwrap_err().contains("lists no replica"));
        assert_eq!(others_in(&info, &("10.0.0.2".into(), 6379)), ["10.0.0.1:6379", "10.0.0.3:6380"]);
        let own = (hosts(&["10.0.0.1"]), Some(6379));
        assert!(leads_to(&("10.0.0.1".into(), 6379), &own));
        assert!(!leads_to(&("10.0.0.1".into(), 6380), &own) && !leads_to(&("10.0.0.2".into(), 6379), &own));
    }
}
