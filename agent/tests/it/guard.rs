//! An agent that is killed leaves a server that can follow any primary again: its `masterauth` is what it was.

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, require};

use crate::kit::{LONG, Source, Stage, fill_keys, load_slowly, quick, succeeds, wait_until_loading};

/// The primary's password.
const PASSWORD: &str = "s3cret-primary";

struct Scene {
    stage: Stage,
    primary: Server,
    replica: Server,
    source: Source,
}

impl Scene {
    fn new(kind: Kind, password: &str) -> Scene {
        let stage = Stage::new();
        let (primary, replica) = match password {
            "" => (quick(kind), Server::builder(kind)),
            password => (quick(kind).require_pass(password), Server::builder(kind).master_auth(None, password)),
        };
        let (primary, replica) = (primary.start().unwrap(), replica.start().unwrap());
        fill_keys(&primary, 2000, "x");
        let file = stage.secret("password", PASSWORD);
        let options = ["--password-file", &file];
        let source = stage.source(&primary.url(), if password.is_empty() { &[] } else { &options });
        Scene { stage, primary, replica, source }
    }

    fn agent(&self, more: &[&str]) -> Agent {
        self.stage.replica(&self.replica.url(), self.source.address, more)
    }

    /// An operator points the server at the primary, and does nothing else.
    fn assert_follows_by_hand(&self, password: &str) {
        self.replica.replicate(&self.primary).unwrap();
        self.replica.wait_for_link(LONG).unwrap();
        assert_eq!(self.replica.configured("masterauth").unwrap(), password);
        assert_same_data(&self.primary, &self.replica);
    }
}

#[test]
fn a_server_whose_agent_was_killed_while_it_loaded_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            load_slowly(&scene.replica, 1000);
            let mut agent = scene.agent(&[]);
            wait_until_loading(&scene.replica);
            agent.kill().unwrap();
            scene.replica.configure("key-load-delay", "0").unwrap();
            wait_until_it_has_loaded(&scene.replica);
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
fn a_server_whose_agent_was_killed_when_it_was_in_step_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            let mut agent = scene.agent(&["--stay"]);
            agent.wait_for_event("in_step", LONG).unwrap();
            agent.kill().unwrap();
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
fn a_guard_leaves_the_server_to_the_next_agent_and_ends() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, PASSWORD);
        let mut agent = scene.agent(&["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let guards = || guards_of(&scene.replica);
        assert_eq!(guards().len(), 1, "one guard beside the agent");
        agent.kill().unwrap();
        succeeds(&mut scene.agent(&[]), &scene.replica);
        assert_eq!(scene.replica.configured("masterauth").unwrap(), PASSWORD);
        wait_until("the guards to end", LONG, || {
            let left = guards();
            Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
        })
        .unwrap();
    }
}

/// An agent that `remora migrate` has started ends with it. Its guard must not.
#[test]
fn an_agent_that_migrate_has_started_has_a_guard_too() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, "");
        load_slowly(&scene.replica, 1000);
        let (from, to) = (scene.primary.url(), scene.replica.url());
        let mut agent = scene.stage.start(None, &["migrate", "--from", &from, "--to", &to]);
        wait_until_loading(&scene.replica);
        assert_eq!(guards_of(&scene.replica).len(), 1, "{}", agent.output());
        agent.kill().unwrap();
        scene.replica.configure("key-load-delay", "0").unwrap();
        wait_until_it_has_loaded(&scene.replica);
        scene.assert_follows_by_hand("");
    }
}

/// A server that loads from a link that has ended notices that soon, and takes no command before.
fn wait_until_it_has_loaded(server: &Server) {
    wait_until("the server to load no more", LONG, || {
        let info = server.client()?.info("persistence")?;
        Ok(if info.get("loading") == Some("0") { Ok(()) } else { Err("it loads".to_owned()) })
    })
    .unwrap();
}

/// The processes that guard this server.
fn guards_of(server: &Server) -> Vec<u32> {
    let (url, mut found) = (server.url(), Vec::new());
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let has = |text: Vec<u8>, part: &str| String::from_utf8_lossy(&text).contains(part);
        if has(read("cmdline"), &url) && has(read("environ"), "REMORA_GUARD_OF=") {
            found.push(id);
        }
    }
    found
}
