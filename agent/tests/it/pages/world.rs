//! The hosts of a page: each a network namespace with the page's address, and a shell in it.
//!
//! ```text
//!   this machine                     a page's hosts
//!   /usr, /dev ── as they are ─────▶ /       one folder as the root of all of a page's hosts: what is copied
//!   /etc ──────── a copy ──────────▶ /etc    to each host there is copied to all here
//!   remora, the servers ── one ────▶ /opt/bin
//! ```
//!
//! The shells see nothing else of this machine's files, and have process namespaces of their own: servers that a page
//! starts as daemons end with their shell.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;

use remora_lab::process::spawn;
use remora_lab::server::wait_until;
use remora_lab::tls::Authority;
use remora_lab::{Host, Kind, Net, scratch};
use tempfile::TempDir;

use super::Scene;
use super::page::{Block, Use, has};
use crate::backup::bucket::Store;
use crate::kit::LONG;

/// The hosts of one page, and what has been said there.
pub(super) struct World {
    /// The one in which blocks without a mark are run first.
    shells: Vec<Shell>,
    staying: Vec<Staying>,
    /// Everything, for the message of a failure.
    transcript: String,
    scripts: usize,
    /// What of [`Scene::meanwhile`] has happened.
    happened: BTreeSet<&'static str>,
    store: Option<Store>,
    folder: TempDir,
    _net: Net,
}

/// A command that stays.
struct Staying {
    host: String,
    command: String,
    pid: String,
    said: PathBuf,
}

/// What the last block has printed.
enum Said {
    Nothing,
    Text(String),
    Staying(usize),
}

impl World {
    pub(super) fn new(scene: &Scene, kind: Kind) -> World {
        let (folder, net) = (scratch::folder("page").unwrap(), Net::new().unwrap());
        let root = folder.path().join("root");
        // Every user of the page's hosts may pass.
        for (place, mode) in [("", 0o755), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777), ("opt", 0o755)] {
            make(&root.join(place), mode);
        }
        for place in ["usr", "dev", "sys", "proc", "run", "mnt", "opt/bin", "var/lib"] {
            make(&root.join(place), 0o755);
        }
        make(&root.join("root"), 0o755); // users read tokens there
        for link in ["bin", "sbin", "lib", "lib64"] {
            let (from, to) = (Path::new("/").join(link), root.join(link));
            match fs::read_link(&from) {
                Ok(target) => std::os::unix::fs::symlink(target, to).unwrap(),
                Err(_) if from.is_dir() => panic!("/{link} is no link into /usr, as on Debian since 12"),
                Err(_) => {}
            }
        }
        let copied = Command::new("cp").args(["-a", "/etc"]).arg(root.join("etc")).status().unwrap();
        assert!(copied.success(), "cp -a /etc: {copied}");
        let programs = [
            ("remora", PathBuf::from(env!("CARGO_BIN_EXE_remora"))),
            ("redis-server", kind.binary().unwrap()),
            ("valkey-server", Kind::Valkey9.binary().unwrap_or_default()),
        ];
        let there = programs.iter().filter(|(_, path)| path.is_file());
        there.clone().for_each(|(name, _)| fs::write(root.join("opt/bin").join(name), "").unwrap());
        let binds: String = there
            .map(|(name, path)| {
                format!("mount --bind '{}' opt/bin/{name}\n", fs::canonicalize(path).unwrap().display())
            })
            .collect();
        let shells = scene.hosts.iter().map(|address| Shell::start(&net, address, &root, &binds)).collect();
        let mut world = World {
            shells,
            staying: Vec::new(),
            transcript: String::new(),
            scripts: 0,
            happened: BTreeSet::new(),
            store: None,
            folder,
            _net: net,
        };
        if let Some(address) = scene.store {
            world.start_store(address);
        }
        for (host, command) in scene.before {
            world.run(host, None, command).unwrap_or_else(|fault| world.fails(&fault));
        }
        world
    }

    /// Starts a store for objects on the host of this address, which is called `minio` and whose authority all hosts trust.
    fn start_store(&mut self, address: &str) {
        let authority = Authority::new(self.folder.path(), "authority").unwrap();
        let tls = authority.sign("minio", &["minio"]).unwrap();
        let etc = self.folder.path().join("root/etc");
        let add = |name: &str, text: &str| {
            let mut file = fs::OpenOptions::new().append(true).open(etc.join(name)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        add("hosts", &format!("{address} minio\n"));
        add("ssl/certs/ca-certificates.crt", &fs::read_to_string(&authority.ca).unwrap());
        let store = Store::start();
        let host = self.shell(address).unwrap().host.clone();
        store.serve_at(host.within(|| TcpListener::bind(format!("{address}:9000"))).unwrap().unwrap(), &tls);
        self.store = Some(store);
    }

    /// Runs the blocks of a page, in order.
    pub(super) fn play(mut self, page: &str, blocks: &[Block], scene: &Scene) {
        if let Err((line, fault)) = self.blocks(blocks, scene) {
            self.fails(&format!("{page}:{line}: {fault}"));
        }
        if let Err(fault) = self.end_staying() {
            self.fails(&format!("{page}: {fault}"));
        }
    }

    fn blocks(&mut self, blocks: &[Block], scene: &Scene) -> Result<(), (usize, String)> {
        let mut last = Said::Nothing;
        for block in blocks {
            let fault = |fault| (block.line, fault);
            match &block.use_ {
                Use::NotRun(_) => {}
                Use::Run | Use::Stays => last = self.commands(block, scene)?,
                Use::Output => self.compare(block, &last).map_err(fault)?,
            }
        }
        Ok(())
    }

    fn commands(&mut self, block: &Block, scene: &Scene) -> Result<Said, (usize, String)> {
        let host = block.host.clone().unwrap_or_else(|| scene.hosts[0].to_owned());
        let commands = block.commands();
        let mut text = String::new();
        for (number, (line, command)) in commands.iter().enumerate() {
            let fault = |fault| (*line, fault);
            for (part, host, other) in scene.meanwhile.iter().filter(|(part, ..)| command.contains(part)) {
                if self.happened.insert(part) {
                    self.run(host, None, other).map_err(|why| fault(format!("before {part:?}: {why}")))?;
                }
            }
            let placed = |text: String, (word, value): &(&str, &str)| text.replace(word, value);
            let command = scene.values.iter().fold(command.clone(), placed);
            if block.use_ == Use::Stays && number + 1 == commands.len() {
                return self.stay(&host, block.user, &command).map(Said::Staying).map_err(fault);
            }
            text += &self.run(&host, block.user, &command).map_err(fault)?;
        }
        Ok(Said::Text(text))
    }

    /// Compares what the page says with what the block before it, or the agents of the named host, have printed.
    fn compare(&self, block: &Block, last: &Said) -> Result<(), String> {
        let said = || match (last, &block.host) {
            (_, Some(host)) => {
                let there = self.staying.iter().filter(|staying| staying.host == *host);
                there.map(|staying| fs::read_to_string(&staying.said).unwrap_or_default()).collect()
            }
            (Said::Text(text), None) => text.clone(),
            (Said::Staying(number), None) => fs::read_to_string(&self.staying[*number].said).unwrap_or_default(),
            (Said::Nothing, None) => String::new(),
        };
        // What stays has time to print it.
        let limit = if matches!(last, Said::Text(_)) && block.host.is_none() { NOW } else { LONG };
        let waited = wait_until("what the page prints", limit, || {
            let said = said();
            Ok(if has(&said, &block.text) { Ok(()) } else { Err(said) })
        });
        waited.map_err(|_| format!("the page prints\n{}but it was\n{}", block.text, said()))
    }

    /// Runs a command on that host to its end, which must be a good one, and returns what it prints.
    fn run(&mut self, host: &str, user: Option<u32>, command: &str) -> Result<String, String> {
        let script = self.script(user, command)?;
        let shell = self.shell(host)?;
        let done = shell.ask(&format!(". {script} </dev/null; printf '\\001%d\\n' $?"));
        let (said, code) = done.unwrap_or_else(|said| (said, "no end within two minutes".into()));
        let _ = writeln!(self.transcript, "{host}$ {command}\n{said}"); // a string takes everything
        // What a page kills by `timeout` ends so.
        let wanted = if command.starts_with("timeout -s KILL") { "137" } else { "0" };
        if code == wanted { Ok(said) } else { Err(format!("`{command}` ended with {code}, and not with {wanted}")) }
    }

    fn stay(&mut self, host: &str, user: Option<u32>, command: &str) -> Result<usize, String> {
        let script = self.script(user, &format!("exec {command}"))?;
        let file = format!("{script}.said");
        let said = self.folder.path().join("root").join(file.trim_start_matches('/'));
        let shell = self.shell(host)?;
        let (_, pid) = shell.ask(&format!("( . {script} ) </dev/null >{file} 2>&1 &\nprintf '\\001%d\\n' $!"))?;
        let _ = writeln!(self.transcript, "{host}$ {command}   # stays");
        self.staying.push(Staying { host: host.into(), command: command.into(), pid, said });
        Ok(self.staying.len() - 1)
    }

    /// Stops what stays, the last first, as an operator does.
    fn end_staying(&mut self) -> Result<(), String> {
        for number in (0..self.staying.len()).rev() {
            let Staying { host, command, pid, .. } = &self.staying[number];
            let (host, command, pid) = (host.clone(), command.clone(), pid.clone());
            let (_, code) = self.shell(&host)?.ask(&format!("kill {pid}; wait {pid}; printf '\\001%d\\n' $?"))?;
            if code != "0" {
                return Err(format!("`{command}` was stopped, and ended with {code}"));
            }
        }
        Ok(())
    }

    /// Writes a command into a file of all hosts, and returns the file's path there.
    fn script(&mut self, user: Option<u32>, command: &str) -> Result<String, String> {
        self.scripts += 1;
        let name = format!("/tmp/command-{}", self.scripts);
        let write = |name: &str, text: &str| {
            let path = self.folder.path().join("root").join(name.trim_start_matches('/'));
            fs::write(&path, format!("{text}\n")).map_err(|error| format!("{}: {error}", path.display()))
        };
        let Some(user) = user else { return write(&name, command).map(|()| name) };
        write(&format!("{name}.user"), command)?;
        let home = format!("/var/lib/user-{user}");
        let exec = if command.starts_with("exec ") { "exec " } else { "" };
        let as_user = format!("setpriv --reuid {user} --regid {user} --clear-groups bash {name}.user");
        write(&name, &format!("install -d -o {user} {home}\n{exec}env HOME={home} {as_user}")).map(|()| name)
    }

    fn shell(&mut self, host: &str) -> Result<&mut Shell, String> {
        let shell = self.shells.iter_mut().find(|shell| shell.address == host);
        shell.ok_or_else(|| format!("this page's test has no host {host}"))
    }

    #[track_caller]
    fn fails(&self, fault: &str) -> ! {
        let mut text = format!("{fault}\n\nWhat was run:\n{}", self.transcript);
        for Staying { host, command, said, .. } in &self.staying {
            let said = fs::read_to_string(said).unwrap_or_default();
            let _ = writeln!(text, "\n{host}: {command}\n{said}");
        }
        panic!("{text}");
    }
}

/// How long a command that has ended may take to print what it prints: its output is read by then.
const NOW: std::time::Duration = std::time::Duration::ZERO;

fn make(path: &Path, mode: u32) {
    fs::create_dir_all(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A shell of root on a host. It ends, with all that it started, when it is dropped.
struct Shell {
    address: String,
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    host: Host,
}

/// Its beginning. `$0` is the folder that becomes the root.
const BEGIN: &str = "set -e
exec 2>&1
cd \"$0\"
for folder in usr dev sys; do mount --rbind /$folder $folder; done
mount -o remount,bind,ro usr
mount -t proc proc proc
BINDS
exec chroot . /bin/bash --noprofile --norc";

/// What a page's preparation calls.
const WORDS: &str = r#"cd /root
# [BY=UID] up PROGRAM ADDRESS PORT [OPTION...]: starts a server that persists nothing, with a folder and a configuration
# file of its own, and waits until it answers.
up() {
    local folder=/var/lib/redis-$2-$3 by=(${BY:+setpriv --reuid $BY --regid $BY --clear-groups})
    install -d "$folder" && touch "$folder/redis.conf" && chown -R "${BY:-0}" "$folder" || return
    "${by[@]}" "$1" "$folder/redis.conf" --dir "$folder" --bind "$2" 127.0.0.1 --port "$3" --save '' --protected-mode no \
        --logfile log --daemonize yes "${@:4}" || return
    until redis-cli -h "$2" -p "$3" ping 2>/dev/null | grep -qE 'PONG|LOADING|MASTERDOWN'; do sleep 0.05; done
}"#;

impl Shell {
    fn start(net: &Net, address: &str, root: &Path, binds: &str) -> Shell {
        let host = net.host(address).unwrap();
        let mut ip = Command::new("ip");
        host.enter(ip.args(["address", "add", &format!("{address}/{NETWORK}"), "dev", "eth0"])).unwrap();
        let added = ip.output().unwrap();
        assert!(added.status.success(), "{address}: {}", String::from_utf8_lossy(&added.stderr));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &BEGIN.replace("BINDS\n", binds)]);
        command.arg(root).env_clear().env("HOME", "/root").env("NO_COLOR", "1");
        command.env("PATH", "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        host.enter(&mut command).unwrap();
        let mut process = spawn(command).unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if tell.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        let mut shell = Shell { address: address.into(), process, input, lines, host };
        shell.ask(&format!("{WORDS}\nprintf '\\001%d\\n' $?")).unwrap_or_else(|said| panic!("{address}: {said}"));
        shell
    }

    /// Sends lines of which the last prints the mark and a word, and returns what came before the mark, and the word. As
    /// an error what has come if no mark comes.
    fn ask(&mut self, lines: &str) -> Result<(String, String), String> {
        let deadline = Instant::now() + LONG;
        let mut said = String::new();
        if writeln!(self.input, "{lines}").is_err() {
            said = "the shell has ended\n".into();
        }
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            match line.split_once(MARK) {
                Some((rest, word)) => return Ok((said + rest, word.to_owned())),
                None => said += &format!("{line}\n"),
            }
        }
        Err(said)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.process.kill(); // its children are killed with it; it may have ended already
        let _ = self.process.wait();
    }
}

/// How a command's end is told from its output.
const MARK: char = '\u{1}';

/// The length of the network's prefix: all addresses of the pages are in 10.0.0.0/16.
const NETWORK: u8 = 16;
