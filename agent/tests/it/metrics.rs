//! Metrics of a source, as a client of HTTP sees them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use remora_lab::server::wait_until;
use remora_lab::{Server, require};

use crate::kit::{LONG, Source, fill, primary};

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_source_shows_its_snapshot_its_replicas_and_whether_its_server_answers() {
    let Some(kind) = require::valkey() else { return };
    let mut server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let address = SocketAddr::from(([127, 0, 0, 1], remora_lab::scratch::free_port().unwrap()));
    let source = Source::start(&server, &["--metrics", &address.to_string()]);
    let before = get(address, "/metrics");
    for line in ["HTTP/1.1 200 ", "remora_source_server_up 1.0", "remora_snapshot_state{state=\"none\"} 1.0", "# EOF"] {
        assert!(before.contains(line), "{line}: {before}");
    }
    let replica = Server::start(kind).unwrap();
    let mut stays = source.replica(&replica, &["--stay", "--name", "a-replica"]);
    stays.wait_for_line("in step; staying", LONG).unwrap();
    let text = wait_until("the replica to be shown as staying", LONG, || {
        let text = get(address, "/metrics");
        Ok(if text.contains("remora_replicas{phase=\"stay\"} 1.0") { Ok(text) } else { Err(text) })
    })
    .unwrap();
    for line in [
        "remora_snapshot_state{state=\"complete\"} 1.0",
        "remora_snapshots_total{result=\"taken\"} 1",
        "remora_replica_progress_ratio{replica=\"a-replica\"} 1.0",
        "remora_replica_info{replica=\"a-replica\",address=\"127.0.0.1:",
        "remora_primary_backlog_bytes ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    assert!(value("remora_snapshot_bytes ") > 8e6 && value("remora_memory_used_bytes ") > 8e6);
    assert!(get(address, "/readyz").starts_with("HTTP/1.1 200 "));
    // The server is gone: the source lives, and is not ready.
    server.kill().unwrap();
    assert!(get(address, "/healthz").starts_with("HTTP/1.1 200 "));
    let said = get(address, "/readyz");
    assert!(said.starts_with("HTTP/1.1 503 ") && said.contains(&server.address().to_string()), "{said}");
    assert!(get(address, "/metrics").contains("remora_source_server_up 0.0"));
    drop(stays);
}
