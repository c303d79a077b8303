//! `remora source --from-file`: a snapshot that some server has written, and the stream behind it.

use std::fs;
use std::path::Path;

use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Kind, Server, assert_same_data, require};

use crate::kit::{LONG, Stage, fill, number, primary, quick, says, steady_writer};

/// The file that a server has just saved, in a place of its own.
fn saved(server: &Server, to: &str) {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    let file = Path::new(&server.configured("dir").unwrap()).join(server.configured("dbfilename").unwrap());
    fs::copy(file, to).unwrap();
}

/// What a source says that refuses this file.
fn refused(stage: &Stage, server: &Server, file: &str, words: &[&str]) {
    let (url, token) = (server.url(), stage.token.display().to_string());
    let args = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0", "--from-file", file];
    let before = number(server, "sync_full");
    says(&stage.end(&args, 3), words);
    assert_eq!(number(server, "sync_full"), before, "{file}");
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_a_file_that_a_replica_has_saved_are_exact() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let replica = quick(kind).start().unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        let writer = steady_writer(&server);
        writer.wait_for(3_000);
        let stage = Stage::new();
        let file = stage.path("dump.rdb");
        saved(&replica, &file);
        writer.wait_for(6_000);
        let mut source = stage.source(&server.url(), &["--from-file", &file]);
        source.wait_for_snapshot();
        let joiners = [quick(kind).start().unwrap(), quick(kind).start().unwrap()];
        for joiner in &joiners {
            source.replicate(joiner, &[]);
            writer.wait_for(writer.commands() + 500);
        }
        writer.stop().unwrap();
        for joiner in &joiners {
            assert_same_data(&server, joiner);
        }
        assert_eq!(number(&server, "sync_full"), 1, "{kind}: the one of the server's own replica");
    }
}

#[test]
fn a_file_behind_which_the_primary_does_not_continue_is_refused_and_costs_it_nothing() {
    let server = quick(Kind::Redis7).config("repl-backlog-size", "16kb").start().unwrap();
    fill(&server, 1, 2);
    let replica = quick(Kind::Redis7).start().unwrap();
    replica.replicate(&server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    let stage = Stage::new();
    let file = stage.path("dump.rdb");
    saved(&replica, &file);
    let other = primary(Kind::Redis7).start().unwrap();
    refused(&stage, &other, &file, &["would not continue", &file]);
    fill(&server, 4, 3);
    // The primary gives up what its replica has got when it writes more.
    wait_until("the primary to give up its first bytes", LONG, || {
        server.client()?.ok(&["SET", "one", "more"])?;
        let first = number(&server, "repl_backlog_first_byte_offset");
        Ok(if first > 3 << 20 { Ok(()) } else { Err(first.to_string()) })
    })
    .unwrap();
    refused(&stage, &server, &file, &["would not continue", &file, "repl-backlog-size"]);

    // Of a server without replicas, and parts of a file.
    let foreign = stage.path("foreign.rdb");
    saved(&other, &foreign);
    refused(&stage, &other, &foreign, &[&foreign, "repl-id"]);
    let bytes = fs::read(&file).unwrap();
    let torn = stage.path("torn.rdb");
    for length in [0, 5, 200, bytes.len() / 2, bytes.len() - 3] {
        fs::write(&torn, &bytes[..length]).unwrap();
        refused(&stage, &server, &torn, &[&torn, "damaged"]);
    }
    refused(&stage, &server, &stage.path("missing.rdb"), &["missing.rdb", "cannot be read"]);
}
