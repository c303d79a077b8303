//! Nothing is left behind. The only test of its process, since it counts the process's descriptors.
#![allow(clippy::unwrap_used, unreachable_pub)]

#[path = "it/kit.rs"]
#[allow(dead_code)]
mod kit;

use kit::*;
use remora_messenger::Policy;

#[test]
fn connections_made_and_ended_while_messages_are_in_flight_leave_nothing_behind() {
    let server = end(Policy::stateless_server(), Recorder { echoes: true, ..Recorder::default() });
    let address = server.messenger.listen(&anywhere()).unwrap();
    let before = descriptors();
    for round in 0..30 {
        let client = end(Policy::lossy_client(), Recorder::default());
        let connections: Vec<_> = (0..20).map(|_| client.messenger.connect(&address)).collect();
        for (at, connection) in connections.iter().enumerate() {
            (0..10).for_each(|number| connection.send(numbered(number)).unwrap());
            match (at + round) % 3 {
                0 => connection.abort(),
                1 => {
                    connection.cut();
                    connection.close();
                }
                _ => connection.close(),
            }
        }
        if round % 2 == 0 {
            drop(client);
        } else {
            until("ends", || {
                client.recorder.callbacks().iter().filter(|callback| **callback != Callback::Connected).count() >= 20
            });
        }
    }
    until("no descriptor is left over", || descriptors() <= before + 2);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
