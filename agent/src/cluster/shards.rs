//! The nodes of a cluster by `CLUSTER SHARDS`: for nodes whose `CLUSTER NODES` cannot be believed. Pure.
//!
//! Texts have their lengths there, so that what stands in the place of an address ends where it should. Less is told:
//! no epoch, no slots that move key by key, and no port of the bus, which the lines of `CLUSTER NODES` still have.

use remora_redis::resp::Frame;

use super::nodes::{Node, Slots, bus_port, is_a_secret, is_id};

/// Servers have their bus at this distance from their port, unless `cluster-port` says otherwise.
const BUS_DISTANCE: u16 = 10_000;

/// The nodes that the answer names; `own`: the id of the one that was asked; `lines`: what it said to `CLUSTER NODES`.
/// `None`: it is no such answer.
pub(super) fn nodes(answer: &Frame, own: &str, lines: &str) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    for shard in answer.as_array()? {
        let numbers: Vec<u16> = field(shard, "slots")?.as_array()?.iter().filter_map(slot).collect();
        let pairs = numbers.chunks_exact(2).filter_map(|pair| match pair {
            [first, last] => Some(Slots { first: *first, last: *last }),
            _ => None,
        });
        let mut slots: Vec<Slots> = pairs.collect();
        slots.sort();
        let members = field(shard, "nodes")?.as_array()?;
        let is_primary = |member: &&Frame| text(member, "role") == Some("master");
        let primary = members.iter().find(is_primary).and_then(|member| text(member, "id"));
        for member in members {
            nodes.push(node(member, primary, &slots, (own, lines))?);
        }
    }
    Some(nodes)
}

fn node(member: &Frame, primary: Option<&str>, slots: &[Slots], (own, lines): (&str, &str)) -> Option<Node> {
    let id = text(member, "id").filter(|id| is_id(id))?;
    let name = text(member, "hostname").filter(|name| !name.is_empty());
    // What follows a secret need not be text.
    let ip = field(member, "ip").and_then(Frame::as_bytes).map(String::from_utf8_lossy).unwrap_or_default();
    let host = if is_a_secret(&ip) { name.unwrap_or_default() } else { &ip };
    let port = field(member, "port").or_else(|| field(member, "tls-port")).and_then(slot)?;
    let is_primary = text(member, "role") == Some("master");
    let mut flags = vec![if is_primary { "master" } else { "slave" }];
    flags.extend((id == own).then_some("myself"));
    flags.extend(text(member, "health").is_some_and(|health| health.starts_with("fail")).then_some("fail"));
    Some(Node {
        id: id.to_owned(),
        host: host.to_owned(),
        name: name.map(str::to_owned),
        port,
        bus_port: bus_port(lines, id, port).unwrap_or(port.saturating_add(BUS_DISTANCE)),
        flags: flags.into_iter().map(str::to_owned).collect(),
        primary: primary.filter(|_| !is_primary).map(str::to_owned),
        epoch: 0,
        is_connected: true,
        slots: if is_primary { slots.to_vec() } else { Vec::new() },
        moving: Vec::new(),
    })
}

fn field<'a>(map: &'a Frame, name: &str) -> Option<&'a Frame> {
    let pairs = map.as_array()?.chunks_exact(2);
    let mut found = pairs.filter(|pair| pair.first().and_then(Frame::as_str) == Some(name));
    found.next()?.get(1)
}

fn text<'a>(map: &'a Frame, name: &str) -> Option<&'a str> {
    field(map, name)?.as_str()
}

fn slot(frame: &Frame) -> Option<u16> {
    match frame.as_int() {
        Some(number) => number.try_into().ok(),
        None => frame.as_str()?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn bulk(text: &str) -> Frame {
        Frame::Bulk(text.as_bytes().to_vec())
    }

    fn member(digit: &str, ip: &str, name: &str, role: &str, health: &str) -> Frame {
        let words = [("id", digit.repeat(40)), ("ip", ip.to_owned()), ("endpoint", name.to_owned())];
        let more = [("hostname", name.to_owned()), ("role", role.to_owned()), ("health", health.to_owned())];
        let mut all: Vec<Frame> =
            words.into_iter().chain(more).flat_map(|(name, value)| [bulk(name), bulk(&value)]).collect();
        all.extend([bulk("port"), Frame::Integer(7000)]);
        Frame::Array(all)
    }

    #[test]
    fn a_secret_in_the_place_of_an_address_is_passed_over() {
        let secret = "d".repeat(40) + "\nvars currentEpoch 6";
        let members =
            [member("a", "10.0.0.1", "", "master", "online"), member("b", &secret, "10.0.0.2", "replica", "fail")];
        let slots = [100, 200, 0, 9].map(Frame::Integer);
        let shard = [bulk("slots"), Frame::Array(slots.into()), bulk("nodes"), Frame::Array(members.into())];
        let (a, b) = ("a".repeat(40), "b".repeat(40));
        let rest = "- 0 0 1 connected";
        let lines =
            format!("{a} 10.0.0.1:7000@34113,,shard-id=1 master {rest}\n{b} {secret}\n{a} 10.0.0.1:7000@34113 master");
        let answer = Frame::Array(vec![Frame::Array(shard.into())]);
        let nodes = nodes(&answer, &b, &lines).unwrap();
        let [primary, replica] = &nodes[..] else { panic!("{nodes:?}") };
        assert_eq!((primary.bus_port, replica.bus_port), (34113, 17000), "the lines have the one, and not the other");
        assert_eq!((primary.host.as_str(), primary.slots.len(), primary.slots[0].first), ("10.0.0.1", 2, 0));
        assert_eq!((replica.host.as_str(), replica.primary.as_ref()), ("10.0.0.2", Some(&primary.id)));
        assert!(replica.has("myself") && replica.is_lost() && primary.is_primary() && replica.slots.is_empty());
    }
}
