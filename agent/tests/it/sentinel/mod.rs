//! Groups of servers that three real Sentinels watch.

mod attend;
mod fail_over;
mod replica;
mod source;
mod switch;

use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Sentinels, Server, assert_same_data, fill_every_type, sentinel};

use remora_redis::resp::Frame;

use crate::kit::{LONG, Source, Stage, primary};

/// A fail-over is over within seconds.
const SOON: Duration = Duration::from_secs(120);

/// For Sentinels that replace a primary by order alone, however long it does not answer on a busy machine.
const NEVER_DOWN: &str = "sentinel down-after-milliseconds mymaster 60000";

/// A primary with two replicas, and three Sentinels.
struct Scene {
    stage: Stage,
    servers: Vec<Server>,
    sentinels: Sentinels,
    kind: Kind,
}

impl Scene {
    fn new(kind: Kind, lines: &[&str]) -> Scene {
        let start = || primary(kind).config("repl-ping-replica-period", 1).start().unwrap();
        let servers = vec![start(), start(), start()];
        fill_every_type(&mut servers[0].client().unwrap(), 31).unwrap();
        for replica in &servers[1..] {
            replica.replicate(&servers[0]).unwrap();
            replica.wait_for_link(LONG).unwrap();
        }
        let sentinels = Sentinels::start(kind, &servers[0], &[&servers[1], &servers[2]], lines).unwrap();
        Scene { stage: Stage::new(), servers, sentinels, kind }
    }

    /// The server at this address.
    fn at(&self, address: &str) -> usize {
        let address = address.trim_start_matches("redis://");
        let found = self.servers.iter().position(|server| server.address().to_string() == address);
        found.unwrap_or_else(|| panic!("{address} is not in the group:\n{}", self.sentinels.log(0)))
    }

    /// The present primary, as the first Sentinel that lives says.
    fn primary(&self) -> &Server {
        let address = (0..3).find_map(|number| self.sentinels.primary(number).ok()).unwrap();
        &self.servers[self.at(&address)]
    }

    /// Waits until every Sentinel has read this `replica-priority` in the server's INFO.
    fn wait_for_priority(&self, server: &Server, priority: &str) {
        let port = format!("\nport\n{}\n", server.port());
        let wanted = format!("\nslave-priority\n{priority}\n");
        for number in 0..3 {
            wait_until("the Sentinels to know the priority", LONG, || {
                let known = self.sentinels.client(number)?.list(&["SENTINEL", "REPLICAS", sentinel::NAME])?;
                let of_it = known.iter().map(|one| texts(std::slice::from_ref(one))).find(|one| one.contains(&port));
                let of_it = of_it.unwrap_or_default();
                Ok(if of_it.contains(&wanted) { Ok(()) } else { Err(of_it) })
            })
            .unwrap();
        }
    }

    /// A server that no Sentinel knows.
    fn new_server(&self) -> Server {
        Server::start(self.kind).unwrap()
    }

    /// Starts an agent that asks the Sentinels.
    fn replica(&self, server: &Server, source: &Source, more: &[&str]) -> Agent {
        let list = self.sentinels.list();
        let group = ["--sentinel", &list, "--sentinel-name", sentinel::NAME];
        self.stage.replica(&server.url(), source.address, &[&group[..], more].concat())
    }

    /// Waits until the first Sentinel knows this many replicas.
    fn wait_for_replicas(&self, count: usize) {
        wait_until("Sentinel to find the new replica", SOON, || {
            let info = self.sentinels.client(0)?.text(&["INFO", "sentinel"])?;
            Ok(if info.contains(&format!("slaves={count},")) { Ok(()) } else { Err(info) })
        })
        .unwrap();
    }

    fn source(&self, more: &[&str]) -> Source {
        self.stage.source_of_group(None, &self.sentinels, more)
    }

    /// Fails over, and waits until all Sentinels name another primary and the other servers follow it.
    fn fail_over(&self) {
        let former = self.sentinels.primary(0).unwrap();
        self.sentinels.fail_over().unwrap();
        self.sentinels.wait_for_another(&former, SOON).unwrap();
    }
}

/// All texts of an answer, one a line.
fn texts(answer: &[Frame]) -> String {
    let text = |frame: &Frame| match frame {
        Frame::Array(items) => texts(items),
        frame => frame.as_str().unwrap_or_default().to_owned() + "\n",
    };
    answer.iter().map(text).collect()
}

/// The word behind `key` in the first line of `output` that has `line` in it.
#[track_caller]
fn word<'a>(output: &'a str, line: &str, key: &str) -> &'a str {
    let found = output.lines().find(|text| text.contains(line)).and_then(|text| text.split(key).nth(1));
    found.and_then(|rest| rest.split(' ').next()).unwrap_or_else(|| panic!("no {line:?} with {key:?} in:\n{output}"))
}
