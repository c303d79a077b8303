//! `remora switch`: a replica and its primary change their roles, clients write meanwhile, and no write that was
//! acknowledged is lost.

use std::os::unix::fs::PermissionsExt;

use remora_lab::server::wait_until;
use remora_lab::workload::{PairWriter, assert_has_all};
use remora_lab::{Kind, Server, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, ends, fill, number, primary, quick, says, syncs};
use crate::sync::exact::assert_same_content;

fn switch(stage: &Stage, from: &Server, to: &Server, more: &[&str], code: i32) -> String {
    stage.end(&[&["switch", "--from", &from.url(), "--to", &to.url()], more].concat(), code)
}

/// A primary with some data, and a replica of it by the servers' own replication.
fn pair(kind: Kind) -> (Server, Server) {
    let (old, new) = (quick(kind).start().unwrap(), quick(kind).start().unwrap());
    fill(&old, 1, 3);
    new.replicate(&old).unwrap();
    new.wait_for_link(LONG).unwrap();
    (old, new)
}

fn roles(servers: [&Server; 2]) -> [String; 2] {
    servers.map(|server| server.fact("role").unwrap())
}

#[test]
#[ignore = "long: make test-all"]
fn no_acknowledged_write_is_lost_between_two_families_and_back() {
    let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
    for (from, to) in [(valkey, redis), (redis, valkey)] {
        let (old, new) = (primary(from).start().unwrap(), primary(to).start().unwrap());
        fill(&old, 1, 3);
        let source = Source::start(&old, &[]);
        source.replicate(&new, &["--convert"]);
        source.stop();
        let copies = syncs(&old).0;
        let stage = Stage::new();
        let writer = PairWriter::start([&old, &new], 2_000);
        writer.wait_for_more(500, LONG).unwrap();
        for (one, other) in [(&old, &new), (&new, &old), (&old, &new), (&new, &old)] {
            let said = switch(&stage, one, other, &[], 0);
            says(&said, &["is the primary since a pause of", "without a full copy", "back: remora switch --from"]);
            assert_eq!(roles([one, other]), ["slave", "master"]);
            writer.wait_for_more(500, LONG).unwrap();
        }
        let acknowledged = writer.stop();
        assert_has_all(&old, acknowledged).unwrap();
        assert_same_content(&old, &new);
        assert_eq!((syncs(&old).0, syncs(&new).0), (copies, 0), "no full copy but the first");
        assert_eq!((number(&old, "unexpected_error_replies"), number(&new, "unexpected_error_replies")), (0, 0));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_dry_run_changes_nothing_and_what_is_done_is_not_done_again() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        says(&switch(&stage, &old, &new, &["--dry-run"], 0), &["can become the primary", "nothing was changed"]);
        assert_eq!(roles([&old, &new]), ["master", "slave"]);
        let said = switch(&stage, &old, &new, &["--json"], 0);
        let line = said.lines().find(|line| line.starts_with('{')).expect(&said);
        let report: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&report["new"], &report["continued"]), (&new.url().into(), &true.into()), "{report}");
        says(&switch(&stage, &old, &new, &[], 0), &["is the primary already"]);
    }
}

#[test]
fn the_way_back_to_a_server_with_fewer_databases_is_warned_of() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = (Server::start(kind).unwrap(), Server::builder(kind).databases(20).start().unwrap());
        new.replicate(&old).unwrap();
        new.wait_for_link(LONG).unwrap();
        let words = ["has 16 databases, and the new primary 20", "start it with databases 20"];
        says(&switch(&stage, &old, &new, &["--dry-run"], 0), &words);
    }
}

#[test]
fn servers_that_would_lose_writes_or_have_lost_keys_are_refused() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let set = |server: &Server, name: &str, value: &str| {
            server.client().unwrap().ok(&["CONFIG", "SET", name, value]).unwrap();
        };
        // Clients that stay at the old one would be told that their writes are done.
        set(&old, "replica-read-only", "no");
        says(&switch(&stage, &old, &new, &[], 3), &["what they write would be lost", "replica-read-only no"]);
        set(&old, "replica-read-only", "yes");
        // It may not be told to write its file, or has none.
        let client = &mut new.client().unwrap();
        client.ok(&["ACL", "SETUSER", "mover", "on", ">secret", "+@all", "-config|rewrite"]).unwrap();
        let file = stage.secret("password", "secret");
        let login = ["--to-user", "mover", "--to-password-file", &file, "--rewrite-config"];
        says(&switch(&stage, &old, &new, &login, 3), &["CONFIG REWRITE", "--rewrite-config needs it"]);
        set(&old, "replica-ignore-maxmemory", "no");
        set(&old, "maxmemory", "1gb");
        let said = switch(&stage, &old, &new, &["--dry-run"], 0);
        says(&said, &["will be a replica that refuses its primary's writes", "nothing was changed"]);
        // The new one removes keys, and has room then.
        set(&new, "maxmemory-policy", "allkeys-random");
        set(&new, "replica-ignore-maxmemory", "no");
        set(&new, "maxmemory", &(number(&new, "used_memory") - 300_000).to_string());
        let mut client = old.client().unwrap();
        wait_until("keys to be removed", LONG, || {
            client.ok(&["SET", "one", "more"])?;
            let removed = number(&new, "evicted_keys");
            Ok(if removed > 0 { Ok(()) } else { Err(removed.to_string()) })
        })
        .unwrap();
        set(&new, "maxmemory", "1gb");
        says(&switch(&stage, &old, &new, &[], 3), &["removes keys by itself", "since its start", "remora verify"]);
        assert_eq!(roles([&old, &new]), ["master", "slave"]);
    }
}

/// Two hosts call the same command at the same time.
#[test]
fn two_switches_at_the_same_time_leave_one_primary_and_lose_no_write() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let writer = PairWriter::start([&old, &new], 500);
        writer.wait_for_more(100, LONG).unwrap();
        for round in 0..6 {
            let (from, to) = if round % 2 == 0 { (&old, &new) } else { (&new, &old) };
            let (one, other) = (from.url(), to.url());
            let words = ["switch", "--from", &one, "--to", &other];
            let mut both = [stage.start(None, &words), stage.start(None, &words)];
            let said = both.each_mut().map(|agent| {
                agent.wait(LONG).unwrap();
                agent.output()
            });
            // Whatever they say, the same command finishes what both have left.
            let last = switch(&stage, from, to, &[], 0);
            assert_eq!(roles([from, to]), ["slave", "master"], "{said:?}\n{last}");
            writer.wait_for_more(50, LONG).unwrap();
        }
        let acknowledged = writer.stop();
        assert_has_all(&old, acknowledged).unwrap();
        assert_same_content(&old, &new);
    }
}

/// Two operators want the opposite at the same time.
#[test]
#[ignore = "long: make test-all"]
fn two_opposite_switches_at_the_same_time_leave_one_primary_and_lose_no_write() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (one, other) = pair(kind);
        let writer = PairWriter::start([&one, &other], 500);
        writer.wait_for_more(100, LONG).unwrap();
        for _ in 0..10 {
            let both = [(&one, &other), (&other, &one)].map(|(from, to)| [from.url(), to.url()]);
            let start = |[from, to]: &[String; 2]| stage.start(None, &["switch", "--from", from, "--to", to]);
            let mut agents = [start(&both[0]), start(&both[1])];
            let said = agents.each_mut().map(|agent| {
                agent.wait(LONG).unwrap();
                agent.output()
            });
            let mut roles = roles([&one, &other]);
            roles.sort();
            assert_eq!(roles, ["master", "slave"], "{said:#?}");
            writer.wait_for_more(50, LONG).unwrap();
        }
        let acknowledged = writer.stop();
        let (primary, replica) = if roles([&one, &other])[0] == "master" { (one, other) } else { (other, one) };
        assert_has_all(&primary, acknowledged).unwrap();
        assert_same_content(&primary, &replica);
    }
}

/// Has a replica execute nothing of what its primary sends.
fn hold(replica: &Server) {
    replica.client().unwrap().ok(&["CLIENT", "PAUSE", "120000", "WRITE"]).unwrap();
}

fn let_go(replica: &Server) {
    replica.client().unwrap().ok(&["CLIENT", "UNPAUSE"]).unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_does_not_come_up_in_time_leaves_the_primary_as_it_was() {
    let stage = Stage::new();
    for kind in require::kinds() {
        for signal in [None, Some(Signal::TERM)] {
            let (old, new) = pair(kind);
            let writer = PairWriter::start([&old, &new], 100);
            hold(&new);
            writer.wait_for_more(20, LONG).unwrap();
            let words = ["switch", "--from", &old.url(), "--to", &new.url(), "--max-pause", "3s"];
            let mut agent = stage.start(None, &words);
            if let Some(signal) = signal {
                wait_until("the switch to begin", LONG, || {
                    let list = old.client()?.text(&["CLIENT", "LIST"])?;
                    Ok(if list.contains("name=remora-switch ") { Ok(()) } else { Err(list) })
                })
                .unwrap();
                agent.signal(signal).unwrap();
            }
            let said = ends(&mut agent, if signal.is_some() { 7 } else { 18 });
            says(&said, &["is the primary as before"]);
            assert_eq!(roles([&old, &new]), ["master", "slave"], "{said}");
            writer.wait_for_more(10, LONG).unwrap();
            let_go(&new);
            assert_has_all(&old, writer.stop()).unwrap();
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_refuses_leaves_the_primary_as_it_was() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let copies = syncs(&old).0;
        let file = stage.secret("password", "secret");
        let rules = ["on", ">secret", "+@all", "-replicaof"];
        new.client().unwrap().ok(&[&["ACL", "SETUSER", "mover"], &rules[..]].concat()).unwrap();
        let writer = PairWriter::start([&old, &new], 100);
        let said = switch(&stage, &old, &new, &["--to-user", "mover", "--to-password-file", &file], 18);
        says(&said, &["+replicaof", "is the primary as before"]);
        assert_eq!(roles([&old, &new]), ["master", "slave"]);
        writer.wait_for_more(10, LONG).unwrap();
        assert_has_all(&old, writer.stop()).unwrap();
        new.wait_for_link(LONG).unwrap();
        assert_eq!(syncs(&old).0, copies, "the old primary continues its replica");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_switch_that_ended_between_its_steps_is_finished_or_undone_by_the_same_command() {
    let stage = Stage::new();
    for kind in require::kinds() {
        for is_behind in [false, true] {
            let (old, new) = pair(kind);
            let writer = PairWriter::start([&old, &new], 100);
            writer.wait_for_more(10, LONG).unwrap();
            if is_behind {
                hold(&new);
                writer.wait_for_more(10, LONG).unwrap();
            } else {
                old.client().unwrap().ok(&["CLIENT", "PAUSE", "120000", "WRITE"]).unwrap();
                wait_until("the replica to have all", LONG, || {
                    let at = |server: &Server| server.fact("master_repl_offset");
                    let (old, new) = (at(&old)?, at(&new)?);
                    Ok(if old == new { Ok(()) } else { Err(format!("{old} {new}")) })
                })
                .unwrap();
            }
            old.client().unwrap().ok(&["REPLICAOF", "192.0.2.1", "1"]).unwrap();
            says(&switch(&stage, &new, &old, &[], 3), &["a switch the other way", "call that one again"]);
            says(&switch(&stage, &old, &new, &["--dry-run"], 0), &["has stepped down", "nothing was changed"]);
            let said = switch(&stage, &old, &new, &[], if is_behind { 18 } else { 0 });
            let (wanted, holder) = if is_behind { (["master", "slave"], &old) } else { (["slave", "master"], &new) };
            assert_eq!(roles([&old, &new]), wanted, "{said}");
            if is_behind {
                let_go(&new);
            }
            writer.wait_for_more(10, LONG).unwrap();
            assert_has_all(holder, writer.stop()).unwrap();
        }
    }
}

#[test]
fn what_cannot_change_its_role_is_refused_before_anything_is_changed() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let other = quick(kind).start().unwrap();
        says(&switch(&stage, &old, &other, &[], 3), &["not its replica", "remora migrate"]);
        says(&switch(&stage, &new, &other, &[], 3), &["no primary"]);
        says(&switch(&stage, &old, &old, &[], 3), &["same server"]);
        says(&switch(&stage, &old, &new, &["--to-address", "127.0.0.1:1"], 3), &["lists no replica 127.0.0.1:1"]);

        // A replica of a replica: the one between must not be promoted in its place.
        let behind = quick(kind).start().unwrap();
        behind.replicate(&new).unwrap();
        behind.wait_for_link(LONG).unwrap();
        says(&switch(&stage, &old, &behind, &[], 3), &["may follow another replica"]);
        drop(behind);

        // A Sentinel, as far as the server knows.
        let mut sentinel = old.client().unwrap();
        sentinel.call(&["SUBSCRIBE", "__sentinel__:hello"]).unwrap();
        says(&switch(&stage, &old, &new, &[], 3), &["Sentinels watch", "--sentinel-name"]);
        drop(sentinel);
        wait_until("the subscriber to be gone", LONG, || {
            let count = old.client()?.list(&["PUBSUB", "NUMSUB", "__sentinel__:hello"])?[1].as_int();
            Ok(if count == Some(0) { Ok(()) } else { Err(format!("{count:?}")) })
        })
        .unwrap();

        new.configure("replica-read-only", "no").unwrap();
        says(&switch(&stage, &old, &new, &[], 3), &["replica-read-only"]);
        new.configure("replica-read-only", "yes").unwrap();

        // As a primary it would remove keys as soon as a client writes.
        new.configure("maxmemory-policy", "allkeys-lru").unwrap();
        new.configure("maxmemory", "100kb").unwrap();
        says(&switch(&stage, &old, &new, &[], 3), &["maxmemory is 100 KiB (allkeys-lru)", "raise maxmemory"]);
        new.configure("maxmemory", "0").unwrap();

        // Its replicas would be the old one, and those that it has.
        new.configure("min-replicas-to-write", "5").unwrap();
        says(&switch(&stage, &old, &new, &[], 3), &["would take no writes", "min-replicas-to-write is 5"]);
        new.configure("min-replicas-to-write", "1").unwrap();

        // The old one could not log in where it is to follow.
        new.configure("requirepass", "secret").unwrap();
        let file = stage.secret("password", "secret");
        let with_password = ["--to-password-file", &file];
        says(&switch(&stage, &old, &new, &with_password, 3), &["could not follow", "masterauth"]);
        assert_eq!(old.fact("role").unwrap(), "master");
        old.configure("masterauth", "secret").unwrap();
        switch(&stage, &old, &new, &with_password, 0);
        assert_eq!(old.fact("role").unwrap(), "slave");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_hook_leads_clients_to_the_new_primary() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let hook = stage.path("hook");
        let told = stage.path("told");
        std::fs::write(&hook, format!("#!/bin/sh\necho \"$1 $2\" >{told}\ntest ! -e {told}.fails\n")).unwrap();
        std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut client = old.client().unwrap();
        switch(&stage, &old, &new, &["--hook", &hook, "--close-clients"], 0);
        assert_eq!(std::fs::read_to_string(&told).unwrap(), format!("{} {}\n", old.url(), new.url()));
        assert!(client.call(&["PING"]).is_err(), "the connection was closed");

        std::fs::write(format!("{told}.fails"), "").unwrap();
        let mut client = new.client().unwrap();
        let said = switch(&stage, &new, &old, &["--hook", &hook, "--close-clients"], 19);
        says(&said, &["the switch is done", "but the hook", "has failed", "switch back"]);
        assert!(client.call(&["PING"]).is_ok(), "clients stay where the hook has left them");
        assert_eq!(roles([&old, &new]), ["master", "slave"]);
        std::fs::remove_file(format!("{told}.fails")).unwrap();
        // The same command again leads them.
        says(&switch(&stage, &new, &old, &["--hook", &hook, "--close-clients"], 0), &["is the primary already"]);
        assert!(client.call(&["PING"]).is_err(), "the connection was closed");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn both_servers_note_their_roles_if_that_is_wanted() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (mut old, mut new) = pair(kind);
        switch(&stage, &old, &new, &["--rewrite-config"], 0);
        old.restart().unwrap();
        new.restart().unwrap();
        assert_eq!(roles([&old, &new]), ["slave", "master"]);
        old.wait_for_link(LONG).unwrap();
        // The file of one cannot be written: clients are led all the same.
        std::fs::remove_dir_all(old.folder()).unwrap();
        let said = switch(&stage, &new, &old, &["--rewrite-config", "--hook", "/bin/true"], 19);
        says(&said, &["the switch is done", "has not noted its role", "CONFIG REWRITE"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_rules_of_the_help_page_are_enough() {
    let stage = Stage::new();
    for kind in require::kinds() {
        let (old, new) = pair(kind);
        let file = stage.secret("password", "secret");
        // Rules of a subcommand are known since Redis 7.
        let client = ["pause", "unpause", "list", "kill", "setname", "id"].map(|word| format!("+client|{word}"));
        let rules =
            ["on", ">secret", "+ping", "+info", "+replicaof", "+multi", "+exec", "+config|get", "+pubsub|numsub"];
        let rules: Vec<&str> = rules.into_iter().chain(client.iter().map(String::as_str)).collect();
        for server in [&old, &new] {
            server.client().unwrap().ok(&[&["ACL", "SETUSER", "mover"], &rules[..]].concat()).unwrap();
        }
        let login = ["--from-user", "mover", "--from-password-file", &file];
        let login = [&login[..], &["--to-user", "mover", "--to-password-file", &file]].concat();
        let said = switch(&stage, &old, &new, &login, 0);
        assert!(!said.contains("is not known"), "{said}");
        for server in [&old, &new] {
            assert_eq!(server.client().unwrap().list(&["ACL", "LOG"]).unwrap().len(), 0, "{server}");
        }
    }
}

mod by_command {
    use super::*;

    /// How long writes wait, in fifty switches at 5,000 writes a second (docs/how-to/migrate.md).
    #[test]
    #[ignore = "a measurement"]
    fn how_long_writes_wait() {
        let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
        let (old, new) = (primary(redis).start().unwrap(), primary(valkey).start().unwrap());
        fill(&old, 64, 3);
        let source = Source::start(&old, &[]);
        source.replicate(&new, &["--convert"]);
        source.stop();
        let (stage, writer) = (Stage::new(), PairWriter::start([&old, &new], 5_000));
        writer.wait_for_more(5_000, LONG).unwrap();
        let mut waited = Vec::new();
        for round in 0..50 {
            let (one, other) = if round % 2 == 0 { (&old, &new) } else { (&new, &old) };
            writer.take_longest();
            switch(&stage, one, other, &["--quiet"], 0);
            writer.wait_for_more(1_000, LONG).unwrap();
            waited.push(writer.take_longest());
        }
        let acknowledged = writer.stop();
        assert_has_all(&old, acknowledged).unwrap();
        waited.sort_unstable();
        println!(
            "{} writes, none lost; between two of them at a switch: median {:?}, 49 of 50 within {:?}, at most {:?}",
            acknowledged, waited[25], waited[48], waited[49]
        );
    }
}
