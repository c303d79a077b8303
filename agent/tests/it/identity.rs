//! `remora source --identity` and `--source-key`: a holder of the token who poses as the source.

use remora_lab::{Server, assert_same_data, require};

use crate::kit::{Source, Stage, assert_untouched, ends, fill_keys, number, primary, says};

/// Makes a key of a source, and returns its file and its public half.
fn identity(stage: &Stage, name: &str) -> (String, String) {
    let file = stage.path(name);
    let made = stage.remora(&["token", "identity", &file]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    (file, String::from_utf8(made.stdout).unwrap().trim().to_owned())
}

#[test]
fn a_holder_of_the_token_cannot_pose_as_the_source_that_a_replica_knows() {
    let Some(kind) = require::redis() else { return };
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    let [primary, forged] = [(); 2].map(|()| primary(kind).start().unwrap());
    fill_keys(&primary, 1_000, "value");
    fill_keys(&forged, 10, "forged");
    let (file, key) = identity(&stage, "source.key");
    let (other_file, other_key) = identity(&stage, "other.key");
    assert_ne!(key, other_key);
    let replica = |source: &Source, key: &str| {
        source.replica(&server, &["--source-key", key, "--transport", "tcp", "--retry-for", "0"])
    };

    // An attacker with the token: without a key, and with a key of his own.
    for more in [&[][..], &["--identity", &other_file]] {
        let attacker = stage.source(&forged.url(), more);
        says(&ends(&mut replica(&attacker, &key), 5), &["is not the source of --source-key"]);
        let (address, token) = (attacker.address.to_string(), stage.token.display().to_string());
        let ask = ["--source", &address, "--token-file", &token, "--source-key", &key];
        for command in [&["status"][..], &["probe", "--transport", "tcp"]] {
            says(&stage.end(&[command, &ask].concat(), 5), &["is not the source of --source-key"]);
        }
        attacker.stop();
    }
    // One who has no TLS at all.
    let attacker = stage.source(&forged.url(), &["--security", "none"]);
    says(&ends(&mut replica(&attacker, &key), 5), &["does not speak TLS", "--security"]);
    attacker.stop();
    assert_untouched(&server);
    assert_eq!(number(&forged, "sync_full"), 0);

    // The true one, which is no other after a restart.
    let source = stage.source(&primary.url(), &["--identity", &file]);
    says(&source.agent.output(), &[&format!("--source-key {key}")]);
    source.stop();
    let source = stage.source(&primary.url(), &["--identity", &file]);
    let mut agent = replica(&source, &key);
    says(&ends(&mut agent, 0), &["protection=plaintext on loopback"]);
    assert_same_data(&primary, &server);
    // A command that expects no key is served too.
    source.status();
}

#[test]
fn a_key_that_cannot_be_used_is_named_before_anything_begins() {
    let Some(kind) = require::redis() else { return };
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    let (file, key) = identity(&stage, "source.key");
    says(&stage.end(&["token", "identity", &file], 3), &[&file, "left alone"]);
    let (url, token) = (server.url(), stage.token.display().to_string());
    let source = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0"];
    for (option, code, texts) in [
        (&["--identity", "/nowhere/key"][..], 3, &["/nowhere/key (--identity)"][..]),
        (&["--identity", &token], 3, &["no private Ed25519 key", "remora token identity"]),
        (&["--identity", &file, "--security", "none"], 2, &["--identity needs TLS"]),
    ] {
        says(&stage.end(&[&source[..], option].concat(), code), texts);
    }
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o604)).unwrap();
    says(&stage.end(&[&source[..], &["--identity", &file]].concat(), 3), &["mode 0604", "chmod"]);
    let status = ["status", "--source", "127.0.0.1:1", "--token-file", &token];
    says(&stage.end(&[&status[..], &["--source-key", "12ab"]].concat(), 2), &["64 hexadecimal digits"]);
    says(&stage.end(&[&status[..], &["--source-key", &key, "--security", "none"]].concat(), 2), &["needs TLS"]);
}
