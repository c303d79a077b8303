//! Nodes: what a node of a cluster says of all nodes (`CLUSTER NODES`). Pure.
//!
//! ```text
//! <id> <host:port@bus[,hostname]> <flag,flag…> <primary's id or -> <ping> <pong> <epoch> <link> <slots> …
//! 07c3… 10.0.0.5:6379@16379,db5 myself,master - 0 0 3 connected 0-5460 5470 [93->-e7d1…]
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// One node, as another one knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Forty hexadecimal digits.
    pub id: String,
    /// Empty if the node does not know its own address yet.
    pub host: String,
    /// The name that it gave itself (`cluster-announce-hostname`).
    #[serde(skip)]
    pub name: Option<String>,
    /// Where clients come.
    pub port: u16,
    /// Where the other nodes come.
    pub bus_port: u16,
    /// `myself`, `master`, `slave`, `fail?`, …
    pub flags: Vec<String>,
    /// The id of the primary that it follows.
    pub primary: Option<String>,
    /// The configuration epoch: each fail-over has a higher one.
    pub epoch: u64,
    /// Whether the link to it is up. A node has none to itself, and says that it is.
    pub is_connected: bool,
    /// The slots that it serves.
    pub slots: Vec<Slots>,
    /// Slots that go to another node, or come from one, key by key.
    pub moving: Vec<String>,
}

/// Slots that follow each other, the last one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slots {
    /// The first one.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

/// Slots of a cluster.
pub const ALL_SLOTS: u32 = 16_384;

/// A line that is not a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CLUSTER NODES: line {number} is not a node ({what}): {line:?}")]
pub struct NotANode {
    number: usize,
    what: &'static str,
    line: String,
}

/// The nodes that the text names.
///
/// # Errors
/// [`NotANode`].
pub fn parse(text: &str) -> Result<Vec<Node>, NotANode> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let nodes = lines.map(|(number, line)| {
        // A line that is quoted in a message is cut: it comes from another host.
        let wrong = |what| NotANode { number: number + 1, what, line: line.chars().take(200).collect() };
        node(line).map_err(wrong)
    });
    nodes.collect()
}

/// Whether an address in `CLUSTER NODES` is the internal secret that nodes of Redis from 8.0 on tell the others. Valkey
/// from 8.1 on takes it for the address that clients are to be given, and reads on behind its end, up to a zero: so any
/// text may follow, whole lines of other nodes too, and nothing of the answer can be believed.
pub fn have_secrets(text: &str) -> bool {
    text.lines().any(|line| {
        let address = line.split_once(' ').filter(|(id, _)| is_id(id));
        address.is_some_and(|(_, rest)| is_a_secret(rest))
    })
}

/// Whether an address is such a secret, and what follows it.
pub fn is_a_secret(address: &str) -> bool {
    address.get(..SECRET).is_some_and(|secret| secret.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The port of a node's bus, by the lines for it in an answer that cannot be believed as a whole: lines may be repeated
/// in the place of an address. `None`: there is no line for it that has this port, or they differ.
pub fn bus_port(text: &str, id: &str, port: u16) -> Option<u16> {
    let mut told = text.lines().filter_map(|line| {
        let (_, rest) = line.split_once(' ').filter(|(named, _)| *named == id)?;
        let place = Place::parse(rest.split(' ').next()?)?;
        (place.port == port).then_some(place.bus_port)
    });
    let first = told.next()?;
    told.all(|other| other == first).then_some(first)
}

/// Digits of a secret of Redis: `CLUSTER_INTERNALSECRETLEN` in its cluster_legacy.h.
const SECRET: usize = 40;

fn node(line: &str) -> Result<Node, &'static str> {
    let mut words = line.split_ascii_whitespace();
    let mut word = |what| words.next().ok_or(what);
    let id = word("its id")?;
    if !is_id(id) {
        return Err("its id");
    }
    let Place { host, name, port, bus_port } = Place::parse(word("its address")?).ok_or("its address")?;
    let flags = word("its flags")?.split(',').map(str::to_owned).collect();
    let primary = match word("its primary")? {
        "-" => None,
        primary if is_id(primary) => Some(primary.to_owned()),
        _ => return Err("its primary"),
    };
    word("its ping")?;
    word("its pong")?;
    let epoch = word("its epoch")?.parse().map_err(|_| "its epoch")?;
    let is_connected = word("its link")? == "connected";
    let (mut slots, mut moving) = (Vec::new(), Vec::new());
    for word in words {
        match word.strip_prefix('[') {
            Some(word) => moving.push(word.trim_end_matches(']').to_owned()),
            None => slots.push(word.parse().map_err(|()| "its slots")?),
        }
    }
    Ok(Node { id: id.to_owned(), host, name, port, bus_port, flags, primary, epoch, is_connected, slots, moving })
}

/// Whether this is the name of a node or of a shard.
pub fn is_id(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Where a node is, and how it is called.
struct Place {
    host: String,
    name: Option<String>,
    port: u16,
    bus_port: u16,
}

impl Place {
    /// `10.0.0.5:6379@16379,hostname,key=value`. An address of IPv6 has no brackets.
    fn parse(text: &str) -> Option<Place> {
        let (place, rest) = text.rsplit_once('@')?;
        let (bus, names) = rest.split_once(',').unwrap_or((rest, ""));
        let (host, port) = place.rsplit_once(':')?;
        let name = names.split(',').next().filter(|name| !name.is_empty() && !name.contains('='));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        // It becomes a part of file names. An address or a name has no other characters.
        let is_right = |byte: u8| byte.is_ascii_alphanumeric() || b".:-_%".contains(&byte);
        if !host.bytes().chain(name.unwrap_or_default().bytes()).all(is_right) {
            return None;
        }
        let (host, name) = (host.to_owned(), name.map(str::to_owned));
        Some(Place { host, name, port: port.parse().ok()?, bus_port: bus.parse().ok()? })
    }
}

impl Node {
    /// Whether it has this flag.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|found| found == flag)
    }

    /// Whether it is a primary.
    pub fn is_primary(&self) -> bool {
        self.has("master")
    }

    /// Whether other nodes hold it for lost, or do not know yet what it is.
    pub fn is_lost(&self) -> bool {
        ["fail", "handshake", "noaddr"].iter().any(|flag| self.has(flag))
    }

    /// The number of slots that it serves.
    pub fn slot_count(&self) -> u32 {
        self.slots.iter().map(|slots| u32::from(slots.last) - u32::from(slots.first) + 1).sum()
    }

    /// `10.0.0.5:6379`, as messages name it.
    pub fn address(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl std::str::FromStr for Slots {
    type Err = ();

    fn from_str(text: &str) -> Result<Slots, ()> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let slots = Slots { first: first.parse().map_err(drop)?, last: last.parse().map_err(drop)? };
        let is_right = slots.first <= slots.last && u32::from(slots.last) < ALL_SLOTS;
        is_right.then_some(slots).ok_or(())
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

/// Where a new node will listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    /// The IP address.
    pub host: String,
    /// Where clients come.
    pub port: u16,
    /// Where the other nodes come.
    pub bus_port: u16,
}

/// Servers have their bus at this distance from their port, unless `cluster-port` says otherwise.
const BUS_DISTANCE: u16 = 10_000;

impl std::str::FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<NodeAddress, String> {
        let (place, bus) = match text.split_once('@') {
            Some((place, bus)) => (place, Some(bus)),
            None => (text, None),
        };
        let crate::HostPort { host, port } = place.parse()?;
        // The file has an address, and a name in another place.
        if host.parse::<std::net::IpAddr>().is_err() {
            return Err(format!("{host} is not an IP address: nodes of a cluster know each other by these"));
        }
        let bus_port = match bus {
            Some(bus) => bus.parse().ok().filter(|port| *port != 0).ok_or("the port of the bus is behind the @")?,
            None => port.checked_add(BUS_DISTANCE).ok_or("give the port of the bus too: HOST:PORT@BUSPORT")?,
        };
        Ok(NodeAddress { host, port, bus_port })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    /// As Redis 7.0, Valkey 9.1 and older servers write it.
    fn text() -> String {
        let id = |digit: &str| digit.repeat(40);
        format!(
            "{a} 127.0.0.1:7000@17000 myself,master - 0 0 1 connected 0-5460 5470 [93->-{b}] [77-<-{b}]\n\
             {b} ::1:7001@17001,host.example,shard-id={b} slave {a} 0 1753 1 connected\n\
             {c} :0@0 master,noaddr - 17 18 2 disconnected 5461-5469\n",
            a = id("a"),
            b = id("b"),
            c = id("c")
        )
    }

    #[test]
    fn a_secret_in_the_place_of_an_address_is_seen() {
        let secret = "c".repeat(40);
        let line =
            |address: &str| format!("{} {address}:7000@17000,10.0.0.2 master - 0 0 1 connected\n", "b".repeat(40));
        for more in ["", "ects:0\r\nx@y: z\n\n", "\n"] {
            assert!(have_secrets(&(line("10.0.0.1") + &line(&(secret.clone() + more)))));
        }
        assert!(!have_secrets(&text()));
        assert_eq!(parse(&line("10.0.0.1")).unwrap()[0].name.as_deref(), Some("10.0.0.2"));
    }

    #[test]
    fn the_port_of_a_bus_is_read_where_the_lines_for_a_node_agree() {
        let port = |text: &str, digit: &str, port| bus_port(text, &digit.repeat(40), port);
        assert_eq!((port(&text(), "a", 7000), port(&text(), "b", 7001)), (Some(17000), Some(17001)));
        assert_eq!((port(&text(), "a", 7001), port(&text(), "d", 7000)), (None, None));
        let again = text() + &format!("{} 127.0.0.1:7000@9 master", "a".repeat(40));
        assert_eq!((port(&again, "a", 7000), port(&again, "b", 7001)), (None, Some(17001)));
    }

    #[test]
    fn lines_of_all_versions_are_read() {
        let nodes = parse(&text()).unwrap();
        let first = &nodes[0];
        assert_eq!((first.address().as_str(), first.bus_port, first.epoch), ("127.0.0.1:7000", 17000, 1));
        assert!(first.is_primary() && first.has("myself") && !first.is_lost() && first.primary.is_none());
        assert_eq!((first.slot_count(), first.moving.len()), (5462, 2));
        assert_eq!((nodes[1].address().as_str(), nodes[1].primary.as_ref()), ("[::1]:7001", Some(&first.id)));
        assert!(nodes[2].is_lost() && !nodes[2].is_connected && nodes[2].host.is_empty());
        assert_eq!(nodes[0].slots.iter().map(Slots::to_string).collect::<Vec<_>>(), ["0-5460", "5470"]);
    }

    #[test]
    fn what_is_not_a_node_is_named() {
        let id = "a".repeat(40);
        for (line, what) in [
            ("abc 1:1@1 master - 0 0 1 connected".to_owned(), "its id"),
            (format!("{id} 1:1 master - 0 0 1 connected"), "its address"),
            (format!("{id} ../../etc:1@1 master - 0 0 1 connected"), "its address"),
            (format!("{id} 1:1@1 slave zz 0 0 1 connected"), "its primary"),
            (format!("{id} 1:1@1 master - 0 0 x connected"), "its epoch"),
            (format!("{id} 1:1@1 master - 0 0 1 connected 5-3"), "its slots"),
            (format!("{id} 1:1@1 master - 0 0 1 connected 16384"), "its slots"),
            (format!("{id} 1:1@1 master -"), "its ping"),
        ] {
            let error = parse(&format!("{}{line}", text())).unwrap_err();
            assert_eq!((error.number, error.what), (4, what), "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_text_ends_the_process(text in "(?s)[a-f0-9:@,\\-\\[\\] \n]{0,200}|.{0,80}") {
            let _ = parse(&text);
        }

        #[test]
        fn slots_are_read_as_they_are_shown(first in 0..16_384_u16, more in 0..100_u16) {
            let slots = Slots { first, last: first.saturating_add(more).min(16_383) };
            prop_assert_eq!(slots.to_string().parse(), Ok(slots));
        }
    }
}
