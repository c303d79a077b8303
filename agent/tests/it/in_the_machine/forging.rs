//! An attacker who changes, swaps or replays what replicas read by RDMA. It would have to be on the wire; the test
//! changes the source's sealed memory instead, from outside the process, so that each READ returns what such an
//! attacker would put there.

use std::fs::File;
use std::os::unix::fs::FileExt;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data};
use rustix::process::Signal;

use super::{REPLICA_NODES, primary, replica, source};
use crate::kit::{LONG, Stage, fill, says, succeeds};

/// A sealed table in the memory of a source.
struct Table {
    memory: File,
    base: u64,
}

/// Parts of a table that a reader reads (table/README.md).
#[derive(Clone, Copy, Debug)]
enum Part {
    Line,
    /// The entry of a slot, counted from the last one.
    Entry(u64),
    /// A byte in the middle of a slot, counted from the last one.
    Slot(u64),
    /// The last byte of the last record.
    Record,
}

impl Table {
    /// Finds the table by the name of its memory.
    fn of(pid: u32, name: &str) -> Table {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let wanted = format!("/memfd:{name} ");
        let line = maps.lines().find(|line| line.contains(&wanted) && line.contains(" rw-s ")).expect(&maps);
        let base = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
        Table { memory, base }
    }

    fn number<const N: usize>(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes[..N], self.base + at).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Where the part is.
    fn place(&self, part: Part) -> u64 {
        let (slot_size, slots, data) = (self.number::<4>(24), self.number::<4>(28), self.number::<8>(32));
        let published = self.number::<8>(128);
        let slot = |before_last| (published - 1) / slot_size - before_last;
        match part {
            Part::Line => 128,
            Part::Entry(before_last) => 4096 + 64 * (slot(before_last) % slots) + 8,
            Part::Slot(before_last) => data + slot_size * (slot(before_last) % slots) + slot_size / 2,
            Part::Record => data + slot_size * (slot(0) % slots) + (published - 1) % slot_size,
        }
    }

    /// Turns a bit. Done twice, nothing has changed.
    fn turn(&self, place: u64) {
        self.put(place, &[self.bytes(place, 1)[0] ^ 0x10]);
    }

    fn bytes(&self, place: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_exact_at(&mut bytes, self.base + place).unwrap();
        bytes
    }

    fn put(&self, place: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, self.base + place).unwrap();
    }

    /// Where the whole part is that a deed moves, and how many bytes it has.
    fn whole(&self, part: Part) -> (u64, u64) {
        let slot_size = self.number::<4>(24);
        match part {
            Part::Line => (128, 64),
            Part::Entry(_) => (self.place(part) - 8, 64),
            Part::Slot(_) => (self.place(part) - slot_size / 2, slot_size),
            Part::Record => unreachable!("{part:?} is not moved"),
        }
    }
}

/// What is done to a table. Done twice, nothing has changed.
enum Deed {
    Turn(Part),
    /// Two parts of a kind change places.
    Swap(Vec<(Part, Part)>),
    /// Parts are replaced by those of another snapshot of the same data. Its key is another one.
    Replay(Vec<(Part, Vec<u8>)>),
}

impl Deed {
    fn replay(other: &Table, parts: &[Part]) -> Deed {
        let bytes = |part: &Part| {
            let (place, length) = other.whole(*part);
            (*part, other.bytes(place, length))
        };
        Deed::Replay(parts.iter().map(bytes).collect())
    }

    fn name(&self) -> String {
        match self {
            Deed::Turn(part) => format!("{part:?}"),
            Deed::Swap(pairs) => format!("a swap of {pairs:?}"),
            Deed::Replay(parts) => format!("a replay of {:?}", parts.iter().map(|(part, _)| *part).collect::<Vec<_>>()),
        }
    }

    fn happen(&mut self, table: &Table) {
        match self {
            Deed::Turn(part) => table.turn(table.place(*part)),
            Deed::Swap(pairs) => {
                for (one, other) in pairs {
                    let ((one, length), (other, _)) = (table.whole(*one), table.whole(*other));
                    let (of_one, of_other) = (table.bytes(one, length), table.bytes(other, length));
                    assert_ne!(of_one, of_other);
                    table.put(one, &of_other);
                    table.put(other, &of_one);
                }
            }
            Deed::Replay(parts) => {
                for (part, bytes) in parts {
                    let (place, length) = table.whole(*part);
                    let there = table.bytes(place, length);
                    assert_ne!(there, *bytes);
                    table.put(place, bytes);
                    *bytes = there;
                }
            }
        }
    }
}

/// Waits until the agent has named the damage `count` times or more.
fn wait_until_named(agent: &Agent, count: usize) {
    wait_until("the agent to name the damage", LONG, || {
        let said = agent.output();
        Ok(if times_named(&said) >= count { Ok(()) } else { Err(said) })
    })
    .unwrap();
}

fn times_named(said: &str) -> usize {
    let names = ["was changed on its way", "is damaged", "its checksum", "their checksum"];
    said.lines().filter(|line| names.iter().any(|name| line.contains(name))).count()
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_snapshot_that_is_changed_on_its_way_by_rdma_is_refused_and_read_again() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, 6, 5);
    let [mut source, mut another] = [(); 2].map(|()| source(&stage, &primary, &[]));
    // The first replica has the snapshot made.
    let first = Server::start(Kind::Redis7).unwrap();
    succeeds(&mut replica(&stage, &first, &source, REPLICA_NODES[0], &["--transport", "verbs"]), &first);
    source.wait_for_snapshot();
    let table = Table::of(source.agent.pid(), "remora-sealed");

    // The same data, sealed again.
    let second = Server::start(Kind::Redis7).unwrap();
    succeeds(&mut replica(&stage, &second, &another, REPLICA_NODES[0], &["--transport", "verbs"]), &second);
    another.wait_for_snapshot();
    let sealed_again = Table::of(another.agent.pid(), "remora-sealed");
    assert_eq!(table.place(Part::Slot(1)), sealed_again.place(Part::Slot(1)), "both have as many slots");

    // Each part of a table by itself is tried without a network, in `remora-table`.
    let deeds = [
        Deed::Turn(Part::Line),
        Deed::Turn(Part::Slot(1)),
        Deed::Swap(vec![(Part::Slot(1), Part::Slot(2)), (Part::Entry(1), Part::Entry(2))]),
        Deed::replay(&sealed_again, &[Part::Entry(3), Part::Slot(3)]),
    ];
    another.stop();
    for mut deed in deeds {
        let server = Server::start(Kind::Redis7).unwrap();
        deed.happen(&table);
        let options = ["--transport", "auto", "--no-serve-peers", "--memory", "16MiB"];
        let mut agent = replica(&stage, &server, &source, REPLICA_NODES[1], &options);
        wait_until_named(&agent, 1);
        deed.happen(&table);
        succeeds(&mut agent, &server);
        says(&agent.output(), &["transport=\"verbs\""]);
        assert_same_data(&primary, &server);
        println!("{}: named {} times", deed.name(), times_named(&agent.output()));
    }
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_record_that_is_changed_on_its_way_by_rdma_never_reaches_the_server() {
    let (stage, primary) = (Stage::new(), primary());
    let source = source(&stage, &primary, &[]);
    let server = Server::start(Kind::Redis7).unwrap();
    let mut agent = replica(&stage, &server, &source, REPLICA_NODES[0], &["--transport", "verbs", "--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    let table = Table::of(source.agent.pid(), "remora-sealed-journal");
    let published = table.number::<8>(128);
    // The agent does not read while the record is written and changed.
    agent.signal(Signal::STOP).unwrap();
    primary.client().unwrap().ok(&["SET", "changed on its way", "no"]).unwrap();
    wait_until("the record", LONG, || {
        let now = table.number::<8>(128);
        Ok(if now > published + 40 { Ok(()) } else { Err(format!("published {now}")) })
    })
    .unwrap();
    let place = table.place(Part::Record);
    table.turn(place);
    agent.signal(Signal::CONT).unwrap();
    wait_until_named(&agent, 1);
    assert_eq!(server.client().unwrap().int(&["EXISTS", "changed on its way"]).unwrap(), 0);
    table.turn(place);
    wait_until("the command to arrive", LONG, || {
        let there = server.client()?.int(&["EXISTS", "changed on its way"])?;
        Ok(if there == 1 { Ok(()) } else { Err(agent.output()) })
    })
    .unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
    source.stop();
}
