//! What another host of the network can read: everything that leaves a host is recorded, and searched for known keys,
//! values and names. Needs root, for network namespaces, and tcpdump.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use remora_lab::{Agent, Host, Net, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, primary};

/// The keys of the snapshot and of the stream. Shorter than what servers compress.
const KEYS: usize = 5_000;

/// What must not be readable, as it begins, and how often it was read.
const SECRETS: [&str; 5] = ["known-key-", "known-value-", "streamed-key-", "streamed-value-", "known-name"];

#[test]
fn by_default_a_listener_on_the_network_reads_no_key_no_value_and_no_name() {
    let Some((from_source, from_lender)) = overheard(&[], "sealed, TLS 1.3, token") else { return };
    assert_eq!((from_source, from_lender), ([0; 5], [0; 5]));
}

/// Shows that the other test would hear something.
#[test]
fn in_plaintext_a_listener_on_the_network_reads_all_of_them() {
    let Some((from_source, from_lender)) = overheard(&["--security", "none", "--plaintext-network"], "plaintext")
    else {
        return;
    };
    // Some are cut in two by the ends of packets.
    let most = KEYS * 9 / 10;
    for heard in &from_source[..4] {
        assert!(*heard > most, "{from_source:?}");
    }
    assert!(from_lender[..2].iter().all(|heard| *heard > most), "{from_lender:?}");
    assert!(from_source[4] > 0 && from_lender[4] > 0, "{from_source:?}, {from_lender:?}");
}

/// Makes one replica of a source and one of that replica, each on a host of its own, and counts the secrets on the
/// cables of source and lender.
fn overheard(security: &[&str], protection: &str) -> Option<([usize; 5], [usize; 5])> {
    require::namespaces()?;
    require::tcpdump()?;
    let kind = require::redis()?;
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let [here, there, beyond] = ["primary", "lender", "reader"].map(|name| net.host(name).unwrap());
    let primary = primary(kind).on(&here).start().unwrap();
    let [lent, last] = [&there, &beyond].map(|host| Server::builder(kind).on(host).start().unwrap());
    set(&primary, "known");
    let recordings = [&here, &there].map(|host| Recording::start(host, &stage));

    let mut source = stage.source_on(&here, &primary.url(), security);
    // They stay: servers that follow the primary by themselves send what this test would hear.
    let replica = |host: &Host, server: &Server| {
        let options = [security, &["--stay", "--name", "known-name"]].concat();
        stage.replica_on(host, &server.url(), source.address, &options)
    };
    let mut lender = replica(&there, &lent);
    lender.wait_for_event("in_step", LONG).unwrap();
    let mut reader = replica(&beyond, &last);
    let read = reader.wait_for_event("upstream_read", LONG).unwrap();
    assert!(read.contains(&format!("protection={protection}")), "{read}");
    reader.wait_for_event("in_step", LONG).unwrap();
    set(&primary, "streamed");
    for server in [&lent, &last] {
        assert_same_data(&primary, server);
    }
    let heard = recordings.map(Recording::stop);
    for agent in [&mut reader, &mut lender, &mut source.agent] {
        agent.signal(Signal::TERM).unwrap();
        agent.wait(LONG).unwrap();
    }
    let [from_source, from_lender] = heard.map(|bytes| SECRETS.map(|secret| count(&bytes, secret)));
    Some((from_source, from_lender))
}

/// Sets keys whose names and values begin with this word.
fn set(server: &Server, word: &str) {
    let mut client = server.client().unwrap();
    for number in 0..KEYS {
        client.queue(&[
            b"SET".to_vec(),
            format!("{word}-key-{number}").into_bytes(),
            format!("{word}-value-{number}").into_bytes(),
        ]);
    }
    for _ in 0..KEYS {
        assert!(client.receive().unwrap().as_error().is_none());
    }
}

fn count(bytes: &[u8], word: &str) -> usize {
    bytes.windows(word.len()).filter(|window| *window == word.as_bytes()).count()
}

/// A running recording of everything on a host's cable.
struct Recording {
    tcpdump: Agent,
    file: PathBuf,
}

const PATIENCE: Duration = Duration::from_secs(30);

impl Recording {
    fn start(host: &Host, stage: &Stage) -> Recording {
        let file = stage.folder().join(format!("{}.pcap", host.name()));
        let mut tcpdump = Command::new("tcpdump");
        // Whole packets; a large buffer, so that none is missed; as root, who alone can write there.
        tcpdump.args(["-i", "eth0", "-s", "0", "-B", "65536", "-Z", "root", "-w"]).arg(&file);
        host.enter(&mut tcpdump).unwrap();
        let mut tcpdump = Agent::run(tcpdump).unwrap();
        tcpdump.wait_for_line("listening on", PATIENCE).unwrap();
        Recording { tcpdump, file }
    }

    /// Ends the recording, and returns its bytes.
    fn stop(mut self) -> Vec<u8> {
        self.tcpdump.signal(Signal::INT).unwrap();
        self.tcpdump.wait_for_success(PATIENCE).unwrap();
        let said = self.tcpdump.output();
        assert!(said.contains("\n0 packets dropped by kernel"), "{said}");
        std::fs::read(&self.file).unwrap()
    }
}
