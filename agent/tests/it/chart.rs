//! The Helm chart in `deploy/chart`, by what it renders for its examples, which `make chart` keeps: that this is of these
//! templates, that the program knows the commands, and that pods made of it become replicas, as far as a machine without
//! Kubernetes can run them ([`super::kubernetes`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use remora_lab::server::wait_until;
use remora_lab::tls::Authority;
use remora_lab::{Kind, Net, require};
use serde_yaml_ng::Value;
use sha2::{Digest, Sha256};

use crate::kit::{LONG, Stage};
use crate::kubernetes::{Cluster, commands, fill, in_step, manifests, text};

/// The name of the primary's pod in the release `cache`.
const PRIMARY: &str = "cache-primary-0.cache-primary";

/// The password of the servers.
const PASSWORD: &str = "a password of the servers";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart")
}

/// What the chart renders for an example.
fn rendered(example: &str) -> String {
    fs::read_to_string(folder().join("rendered").join(format!("{example}.yaml"))).unwrap()
}

/// The names of the examples.
fn examples() -> Vec<String> {
    let files = fs::read_dir(folder().join("examples")).unwrap();
    let mut names: Vec<String> =
        files.map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

fn find(manifests: &[Value], kind: &str, name: &str) -> Value {
    let found = manifests.iter().find(|document| document["kind"] == kind && document["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}")).clone()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All files below a folder, relative to the chart's.
fn files(below: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder().join(below)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{below}/{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() { found.extend(files(&name)) } else { found.push(name) }
    }
    found
}

#[test]
fn what_is_kept_was_rendered_by_these_templates() {
    let mut files = [files("remora"), files("examples")].concat();
    files.sort();
    // As `sha256sum` prints it.
    let sum = |name: &String| hexadecimal(&Sha256::digest(fs::read(folder().join(name)).unwrap()));
    let list: String = files.iter().map(|name| format!("{}  {name}\n", sum(name))).collect();
    let head = format!("# By make chart, of files with the checksum {}.\n", hexadecimal(&Sha256::digest(list)));
    // Only who changes the chart needs Helm: then this is what it renders, too.
    let helm = folder().join("../../.cache/tools/helm");
    for example in examples() {
        let kept = rendered(&example);
        let text = kept.strip_prefix(&head).unwrap_or_else(|| panic!("{example} is of other files: run make chart"));
        if helm.is_file() {
            let mut render = Command::new(&helm);
            render.args(["template", "cache", "--kube-version", "1.34.0"]).arg(folder().join("remora"));
            let render =
                render.arg("--values").arg(folder().join(format!("examples/{example}.yaml"))).output().unwrap();
            assert!(render.status.success(), "{}", String::from_utf8_lossy(&render.stderr));
            assert_eq!(String::from_utf8(render.stdout).unwrap(), text, "{example}: run make chart");
        }
    }
}

#[test]
fn the_program_understands_the_commands_of_the_chart() {
    let stage = Stage::new();
    let mut seen = 0;
    for example in examples() {
        for words in manifests(&rendered(&example)).iter().flat_map(commands) {
            seen += 1;
            // The help of the command ends it before anything is looked at but its words. Kubernetes replaces $(NAME).
            let words: Vec<String> = words.iter().map(|word| word.replace("$(POD)", "10.0.0.5")).collect();
            let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
            stage.end(&args, 0);
        }
    }
    assert_eq!(seen, 6, "source, intercept and attend, of two examples");
}

/// Makes a primary and two replicas of an example, and replaces one of them.
fn pods_become_replicas(example: &str) {
    let net = Net::new().unwrap();
    let hosts = ["primary", "replica-0", "replica-1"].map(|name| net.host(name).unwrap());
    let manifests = manifests(&rendered(example));
    let mut cluster = Cluster::new((PRIMARY, &hosts[0]));
    cluster.configuration = find(&manifests, "ConfigMap", "cache-servers")["data"].clone();
    cluster.password = Some(PASSWORD.to_owned());
    let secret = PathBuf::from(cluster.stage.secret("password", PASSWORD));
    cluster.mount("/run/remora/password/password", &secret);
    let authority = Authority::new(cluster.stage.folder(), "servers").unwrap();
    let tls = authority.sign("server", &[PRIMARY, &hosts[0].address().to_string()]).unwrap();
    for (name, file) in [("ca.crt", &tls.ca), ("tls.crt", &tls.certificate), ("tls.key", &tls.key)] {
        cluster.mount(&format!("/run/remora/tls/{name}"), file);
    }
    let spec = |name: &str| find(&manifests, "StatefulSet", name)["spec"]["template"]["spec"].clone();
    let (of_primary, of_replica) = (spec("cache-primary"), spec("cache-replica"));
    let primary = cluster.pod(&hosts[0], "cache-primary-0", &of_primary);
    fill(&primary);
    in_step(&cluster, &primary, &primary, &of_primary);
    let pods = [1, 2].map(|number: usize| cluster.pod(&hosts[number], &format!("cache-replica-{number}"), &of_replica));
    for pod in &pods {
        in_step(&cluster, &primary, pod, &of_replica);
        assert_eq!(pod.fact("role").unwrap(), "slave");
    }
    for pod in pods.iter().chain([&primary]) {
        for path in ["/healthz", "/readyz"] {
            // An agent that has just handed its server over still looks whether that went well.
            let waited = wait_until(path, LONG, || {
                let (is_well, said) = pod.page(path);
                Ok(if is_well { Ok(()) } else { Err(said) })
            });
            assert!(waited.is_ok(), "{waited:?}\n{}", pod.output());
        }
    }
    let forks = || (primary.fact("sync_full").unwrap(), primary.fact("total_forks").unwrap());
    let said: String = pods.iter().chain([&primary]).map(|pod| pod.output()).collect();
    assert_eq!(forks(), ("1".into(), "1".into()), "the source's snapshot, and no other\n{said}");
    // A pod that was replaced has nothing, and gets it from the snapshot that is there.
    let [first, _second] = pods;
    cluster.forget(first);
    let again = cluster.pod(&hosts[1], "cache-replica-1", &of_replica);
    in_step(&cluster, &primary, &again, &of_replica);
    assert!(again.output().contains("the source serves it"), "{}", again.output());
    assert_eq!(forks(), ("1".into(), "1".into()), "{}", again.output());
}

#[test]
#[ignore = "long: make test-all"]
fn pods_of_redis_with_tls_become_replicas() {
    if let (Some(()), Some(_)) = (require::namespaces(), require::redis()) {
        pods_become_replicas("redis");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn pods_of_valkey_become_replicas() {
    if let (Some(()), Some(Kind::Valkey9)) = (require::namespaces(), require::valkey()) {
        pods_become_replicas("valkey");
    }
}

/// The metrics are for those alone who are named, and a client reaches a server and nothing else.
#[test]
fn the_ports_of_agents_are_open_to_those_alone_who_are_named() {
    for (example, others) in [("redis", 1), ("valkey", 2)] {
        let policy = find(&manifests(&rendered(example)), "NetworkPolicy", "cache");
        let rules = policy["spec"]["ingress"].as_sequence().unwrap();
        assert_eq!(rules.len(), 1 + others, "{example}");
        let own = &rules[0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"];
        assert_eq!(text(own), "cache");
        for rule in &rules[1..] {
            let ports: Vec<u64> =
                rule["ports"].as_sequence().unwrap().iter().map(|port| port["port"].as_u64().unwrap()).collect();
            assert!(ports == [6379] || ports == [9121] && rule["from"].is_sequence(), "{example}: {ports:?}");
        }
    }
}
