//! Pods of the examples in `deploy/kubernetes` and of the Helm chart, as far as a machine without Kubernetes can run them:
//! each pod is a network namespace, in which the commands of its containers run as processes of their users, with the
//! rights that they are given. What is put in the place of names, volumes and images is said where it happens.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_yaml_ng::Value;
use sha2::{Digest, Sha256};

use crate::kit::{LONG, Stage};
use remora_lab::client::Address;
use remora_lab::server::Authority;
use remora_lab::server::wait_until;
use remora_lab::{Agent, Client, Host, Kind, Net, browser, require};

/// The group of `fsGroup`, to which volumes belong.
const GROUP: u32 = 999;

/// The manifests of a text.
pub(crate) fn manifests(text: &str) -> Vec<Value> {
    let read = |document| <Value as serde::Deserialize>::deserialize(document).unwrap();
    serde_yaml_ng::Deserializer::from_str(text).map(read).filter(|document: &Value| !document.is_null()).collect()
}

/// A manifest of the examples.
fn manifest(name: &str, kind: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes").join(name);
    manifests(&fs::read_to_string(&path).unwrap()).into_iter().find(|document| document["kind"] == kind).unwrap()
}

/// What every pod shares: the names of the primary, a token, and a copy of the program that other users may run.
pub(crate) struct Cluster {
    pub(crate) stage: Stage,
    program: PathBuf,
    /// What is put in the place of names, and of files of secrets.
    pub(crate) places: Vec<(String, String)>,
    /// The files of a ConfigMap, with which servers are started.
    pub(crate) configuration: Value,
    /// The password of the servers.
    pub(crate) password: Option<String>,
}

/// A pod whose containers run.
pub(crate) struct Pod {
    host: Host,
    name: String,
    data: PathBuf,
    password: Option<String>,
    containers: BTreeMap<String, Agent>,
}

impl Cluster {
    pub(crate) fn new(primary: (&str, &Host)) -> Cluster {
        let stage = Stage::new();
        fs::set_permissions(stage.folder(), PermissionsExt::from_mode(0o755)).unwrap();
        let program = stage.folder().join("remora");
        fs::copy(env!("CARGO_BIN_EXE_remora"), &program).unwrap();
        let places = vec![(primary.0.to_owned(), primary.1.address().to_string())];
        let token = stage.token.clone();
        let mut cluster = Cluster { stage, program, places, configuration: Value::Null, password: None };
        cluster.mount("/run/remora/token/token", &token);
        cluster.mount("/run/remora/token", &token);
        cluster
    }

    /// Shows pods a file at a path, as a secret with `defaultMode: 0440` appears to a pod with an `fsGroup`.
    pub(crate) fn mount(&mut self, path: &str, file: &Path) {
        let mounted = self.stage.folder().join(path[1..].replace('/', "-"));
        fs::copy(file, &mounted).unwrap();
        fs::set_permissions(&mounted, PermissionsExt::from_mode(0o440)).unwrap();
        chown(&mounted, Some(0), Some(GROUP)).unwrap();
        self.places.push((path.to_owned(), mounted.display().to_string()));
    }

    /// Makes a folder that belongs to the servers.
    fn folder(&self, name: &str) -> PathBuf {
        let folder = self.stage.folder().join(name);
        fs::create_dir(&folder).unwrap();
        chown(&folder, Some(999), Some(GROUP)).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o2770)).unwrap();
        folder
    }

    /// Removes what a pod had.
    pub(crate) fn forget(&self, pod: Pod) {
        for name in [pod.name.clone(), format!("{}-run", pod.name)] {
            let folder = self.stage.folder().join(name);
            if folder.exists() {
                fs::remove_dir_all(folder).unwrap();
            }
        }
    }

    /// Runs the containers of a pod in the order of Kubernetes: the initial ones one after the other, each to its end
    /// unless it is a sidecar, and then the others.
    pub(crate) fn pod(&self, host: &Host, name: &str, spec: &Value) -> Pod {
        let (data, password) = (self.folder(name), self.password.clone());
        let mut pod = Pod { host: host.clone(), name: name.into(), data, password, containers: BTreeMap::new() };
        for volume in spec["volumes"].as_sequence().unwrap().iter().filter(|volume| volume["name"] == "config") {
            let text = text(&self.configuration[&volume["configMap"]["items"][0]["key"]]);
            // The digest, and the way to ask for it, are for this test.
            let more = "enable-debug-command yes\nunixsocket /data/socket\n";
            let folder = self.folder(&format!("{name}-run"));
            fs::write(folder.join("given.conf"), self.placed(&pod, &format!("{text}\n{more}"))).unwrap();
        }
        for container in spec["initContainers"].as_sequence().into_iter().flatten() {
            let mut agent = self.start(&pod, container, spec);
            let name = container["name"].as_str().unwrap();
            if container["restartPolicy"] == "Always" {
                pod.containers.insert(name.into(), agent);
                // What comes after a sidecar waits for its probe.
                if let Some(path) = container["startupProbe"]["httpGet"]["path"].as_str() {
                    let waited = wait_until("the sidecar to have started", LONG, || {
                        let (is_well, said) = pod.page(path);
                        Ok(if is_well { Ok(()) } else { Err(said) })
                    });
                    assert!(waited.is_ok(), "{waited:?}\n{}", pod.output());
                } else if name == "attend" {
                    pod.containers.get_mut(name).unwrap().wait_for_event("attending", LONG).unwrap();
                }
            } else {
                // One that fails is started again.
                wait_until("the initial container to end well", LONG, || {
                    if agent.wait(LONG)?.success() {
                        return Ok(Ok(()));
                    }
                    let said = agent.output();
                    agent = self.start(&pod, container, spec);
                    Ok(Err(said))
                })
                .unwrap();
            }
        }
        for container in spec["containers"].as_sequence().unwrap() {
            let agent = self.start(&pod, container, spec);
            pod.containers.insert(container["name"].as_str().unwrap().into(), agent);
        }
        pod
    }

    fn start(&self, pod: &Pod, container: &Value, spec: &Value) -> Agent {
        let words = |field: &str| container[field].as_sequence().cloned().unwrap_or_default();
        let words: Vec<String> = words("command").iter().chain(&words("args")).map(text).collect();
        self.run(pod, container, spec, &words)
    }

    /// Runs these words in a container.
    fn run(&self, pod: &Pod, container: &Value, spec: &Value, words: &[String]) -> Agent {
        let environment = container["env"].as_sequence().cloned().unwrap_or_default();
        let environment: BTreeMap<String, String> =
            environment.iter().map(|pair| (text(&pair["name"]), self.value(pod, pair))).collect();
        // $(NAME) in arguments is replaced by Kubernetes.
        let expand = |word: &String| {
            environment.iter().fold(word.clone(), |word, (name, value)| word.replace(&format!("$({name})"), value))
        };
        let mut words: Vec<String> = words.iter().map(|word| self.placed(pod, &expand(word))).collect();
        match container["image"].as_str().unwrap() {
            "remora:latest" if words[0] == "remora" => words[0] = self.program.display().to_string(),
            "remora:latest" => words.insert(0, self.program.display().to_string()),
            "redis:7" if !self.configuration.is_null() => {}
            "valkey/valkey:9.1" => {
                let program = Kind::Valkey9.binary().unwrap().display().to_string();
                words[2] = words[2].replace("exec valkey-server", &format!("exec {program}"));
            }
            // The image of Redis has its server without the protected mode. The digest is for this test.
            "redis:7" => {
                let more = "--protected-mode no --enable-debug-command yes";
                match words[0].as_str() {
                    "sh" => words[2] = words[2].replace("redis-server", &format!("redis-server {more}")),
                    _ => words.extend(more.split(' ').map(str::to_owned)),
                }
            }
            image => panic!("no image {image}"),
        }
        let rights = |of: &Value| of["securityContext"].clone();
        let user = [rights(container), rights(spec)].iter().find_map(|context| context["runAsUser"].as_u64()).unwrap();
        let added = rights(container)["capabilities"]["add"].as_sequence().cloned().unwrap_or_default();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &user.to_string(), "--regid", &GROUP.to_string(), "--clear-groups", "--no-new-privs"]);
        let rights: String = added.iter().map(|right| format!(",+{}", text(right).to_lowercase())).collect();
        command.args(["--bounding-set", &format!("-all{rights}"), "--inh-caps", &format!("-all{rights}")]);
        command.args(&words).envs(&environment).env("HOSTNAME", &pod.name).current_dir(&pod.data);
        pod.host.enter(&mut command).unwrap();
        Agent::run(command).unwrap()
    }

    /// The value of a variable: the pod's address, or a text.
    fn value(&self, pod: &Pod, pair: &Value) -> String {
        match pair.get("valueFrom") {
            Some(from) if from["fieldRef"]["fieldPath"] == "status.podIP" => pod.host.address().to_string(),
            Some(from) => panic!("what is {from:?}?"),
            None => self.placed(pod, &text(&pair["value"])),
        }
    }

    /// Names become addresses, and the paths of volumes folders of this machine.
    fn placed(&self, pod: &Pod, word: &str) -> String {
        let (data, run) = (pod.data.display(), format!("{}-run", pod.data.display()));
        let mut word = word.to_owned();
        for (name, place) in &self.places {
            word = word.replace(name, place);
        }
        word.replace("/etc/server/server.conf", &format!("{run}/given.conf"))
            .replace("/run/server", &run)
            .replace("/data", &data.to_string())
    }

    /// Runs the readiness probe of a pod once; whether it says yes, and what it says.
    pub(crate) fn probe(&self, pod: &Pod, spec: &Value) -> (bool, String) {
        let containers = ["initContainers", "containers"].map(|field| spec[field].as_sequence());
        let mut containers = containers.into_iter().flatten().flatten();
        let container = containers.find(|container| !container["readinessProbe"].is_null()).unwrap();
        if let Some(path) = container["readinessProbe"]["httpGet"]["path"].as_str() {
            return pod.page(path);
        }
        let words = container["readinessProbe"]["exec"]["command"].as_sequence().unwrap();
        let words: Vec<String> = words.iter().map(text).collect();
        let mut agent = self.run(pod, container, spec, &words);
        let status = agent.wait(LONG).unwrap();
        (status.success(), agent.output())
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

impl Pod {
    fn client(&self) -> remora_lab::Result<Client> {
        let Some(password) = &self.password else {
            let address = Address::Tcp("127.0.0.1:6379".parse().unwrap());
            return self.host.within(move || Client::connect(&address))?;
        };
        let mut client = Client::connect(&Address::Unix(self.data.join("socket")))?;
        client.auth(None, password)?;
        Ok(client)
    }

    /// Whether the pod's agent answers this path with 200, and the text of its answer.
    pub(crate) fn page(&self, path: &str) -> (bool, String) {
        let answer = self.host.within(|| browser::get("127.0.0.1:9121".parse().unwrap(), path, "")).unwrap();
        answer.map_or_else(|error| (false, error.to_string()), |page| (page.status == 200, page.text))
    }

    pub(crate) fn fact(&self, name: &str) -> remora_lab::Result<String> {
        Ok(self.client()?.info("everything")?.get(name).unwrap_or_default().to_owned())
    }

    /// All that its containers have said, for messages.
    pub(crate) fn output(&self) -> String {
        self.containers.iter().map(|(name, agent)| format!("{} {name}:\n{}\n", self.name, agent.output())).collect()
    }
}

/// Fills the primary once it answers.
pub(crate) fn fill(primary: &Pod) {
    wait_until("the primary to answer", LONG, || Ok(primary.client().map_err(|error| error.to_string()).map(drop)))
        .unwrap();
    let mut client = primary.client().unwrap();
    let commands: Vec<Vec<String>> =
        (0..20_000).map(|number| vec!["SET".into(), format!("key {number}"), "value".repeat(100)]).collect();
    assert!(client.pipeline(&commands).unwrap().iter().all(remora_redis::resp::Frame::is_ok));
    client.ok(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]).unwrap();
}

#[track_caller]
pub(crate) fn in_step(cluster: &Cluster, primary: &Pod, pod: &Pod, spec: &Value) {
    let waited = wait_until("the pod to be ready", LONG, || {
        let (is_ready, said) = cluster.probe(pod, spec);
        Ok(if is_ready { Ok(()) } else { Err(said) })
    });
    assert!(waited.is_ok(), "{waited:?}\n{}\n{}", pod.output(), primary.output());
    let digest = |pod: &Pod| pod.client().unwrap().text(&["DEBUG", "DIGEST"]).unwrap();
    assert_eq!(digest(pod), digest(primary));
}

#[test]
#[ignore = "long: make test-all"]
fn pods_of_the_set_become_replicas_and_the_primary_forks_once_for_all() {
    let (Some(()), Some(_)) = (require::namespaces(), require::redis()) else { return };
    let net = Net::new().unwrap();
    let hosts = ["redis-0", "redis-1", "redis-2"].map(|name| net.host(name).unwrap());
    let cluster = Cluster::new(("redis-0.redis", &hosts[0]));
    let set = manifest("statefulset.yaml", "StatefulSet");
    let spec = &set["spec"]["template"]["spec"];
    let primary = cluster.pod(&hosts[0], "redis-0", spec);
    fill(&primary);
    in_step(&cluster, &primary, &primary, spec);
    let pods = [1, 2].map(|number: usize| cluster.pod(&hosts[number], &format!("redis-{number}"), spec));
    for pod in &pods {
        in_step(&cluster, &primary, pod, spec);
        assert_eq!(pod.fact("role").unwrap(), "slave");
    }
    let said: String = pods.iter().chain([&primary]).map(Pod::output).collect();
    assert_eq!(primary.fact("sync_full").unwrap(), "1", "the source's snapshot, and no other\n{said}");
    assert_eq!(primary.fact("total_forks").unwrap(), "1");
    // A pod that was replaced has nothing, and gets it from the snapshot that is there.
    let [first, _second] = pods;
    drop(first);
    fs::remove_dir_all(cluster.stage.folder().join("redis-1")).unwrap();
    let again = cluster.pod(&hosts[1], "redis-1", spec);
    in_step(&cluster, &primary, &again, spec);
    assert!(again.output().contains("the source serves it"), "{}", again.output());
}

#[test]
#[ignore = "long: make test-all"]
fn pods_start_on_a_fetched_file_and_go_on_at_the_primary() {
    let (Some(()), Some(_)) = (require::namespaces(), require::redis()) else { return };
    let net = Net::new().unwrap();
    let hosts = ["redis-0", "reader-0"].map(|name| net.host(name).unwrap());
    let cluster = Cluster::new(("redis-0.redis", &hosts[0]));
    let set = manifest("statefulset.yaml", "StatefulSet");
    let primary = cluster.pod(&hosts[0], "redis-0", &set["spec"]["template"]["spec"]);
    fill(&primary);
    let set = manifest("fetch.yaml", "StatefulSet");
    let spec = &set["spec"]["template"]["spec"];
    let mut reader = cluster.pod(&hosts[1], "reader-0", spec);
    in_step(&cluster, &primary, &reader, spec);
    assert_eq!(primary.fact("sync_full").unwrap(), "1", "the source's snapshot, and no other\n{}", primary.output());
    assert!(primary.fact("sync_partial_ok").unwrap().parse::<u64>().unwrap() >= 1);
    reader.containers.get_mut("ready").unwrap().wait_for_line("is ready: a replica", LONG).unwrap();
}

/// What the values for charts say of containers has options that the program knows.
#[test]
fn the_values_for_charts_have_commands_that_the_program_understands() {
    let stage = Stage::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/values");
    let mut seen = 0;
    for file in fs::read_dir(&folder).unwrap() {
        let path = file.unwrap().path();
        let values: Value = serde_yaml_ng::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        for words in commands(&values) {
            seen += 1;
            // The help of the command ends it before anything is looked at but its words. Kubernetes replaces $(NAME).
            let words: Vec<String> = words.iter().map(|word| word.replace("$(SOURCE)", "source:7379")).collect();
            let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
            let said = stage.end(&args, 0);
            for option in words.iter().filter(|word| word.starts_with("--")) {
                assert!(said.contains(option.as_str()), "{}: {option} of {words:?}", path.display());
            }
        }
    }
    assert!(seen >= 12, "{seen} commands");
}

/// The arguments of all containers with our image in a file.
pub(crate) fn commands(value: &Value) -> Vec<Vec<String>> {
    match value {
        Value::Mapping(map) if map.get("image").is_some_and(|image| *image == "remora:latest") => {
            let args = map.get("args").and_then(Value::as_sequence).unwrap();
            vec![args.iter().map(text).collect()]
        }
        Value::Mapping(map) => map.values().flat_map(commands).collect(),
        Value::Sequence(items) => items.iter().flat_map(commands).collect(),
        _ => Vec::new(),
    }
}

// The Helm chart in `deploy/chart`, by what it renders for its examples, which `make chart` keeps: that this is of these
// templates, that the program knows the commands, and that pods made of it become replicas.

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
