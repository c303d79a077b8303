//! Three servers, a volume on them, and its files at a directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use remora_bench::sync::{Program, Result};
use remora_lab::server::project_root;
use remora_lab::{Agent, scratch};
use rustix::mount::UnmountFlags;
use rustix::process::Signal;
use tempfile::TempDir;

use super::By;
use crate::commands::{START_LIMIT, TOKEN, ended_well, started};

/// A mounted volume. Nothing is mounted there afterwards.
pub(super) struct Scene<'a> {
    program: &'a Program,
    by: By,
    /// The mount ends before the servers.
    mounted: Option<Agent>,
    servers: Vec<(Agent, String)>,
    folder: TempDir,
}

impl<'a> Scene<'a> {
    pub(super) fn set(program: &'a Program, by: By) -> Result<Scene<'a>> {
        let folder = scratch::folder("prove")?;
        scratch::token_file(folder.path())?;
        std::fs::create_dir(folder.path().join(FILES))?;
        let mut scene = Scene { program, by, mounted: None, servers: Vec::new(), folder };
        for _ in 0..3 {
            scene.servers.push(scene.serve("127.0.0.1:0")?);
        }
        let servers: Vec<&str> = scene.servers.iter().map(|(_, address)| address.as_str()).collect();
        let create = ["volume", "create", VOLUME, "--size", SIZE, "--servers", &servers.join(","), TOKEN, "token"];
        ended_well(program, scene.folder.path(), &create)?;
        ended_well(program, scene.folder.path(), &["volume", "format", VOLUME, TOKEN, "token"])?;
        scene.mount()?;
        Ok(scene)
    }

    fn serve(&self, listen: &str) -> Result<(Agent, String)> {
        let args = ["volume", "serve", "--listen", listen, "--memory", MEMORY, TOKEN, "token"];
        let mut server = started(self.program, self.folder.path(), &args)?;
        let line = server.wait_for_line("volume server ready", START_LIMIT)?;
        let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.ok_or_else(|| format!("the server does not say where it listens: {line}"))?.to_owned();
        Ok((server, address))
    }

    fn mount(&mut self) -> Result<()> {
        let args =
            ["volume", "mount", VOLUME, FILES, "--take-over", "--copy-timeout", "1s", TOKEN, "token", "--no-ring"];
        let args = if self.by == By::Ring { &args[..args.len() - 1] } else { &args };
        let mut mounted = started(self.program, self.folder.path(), args)?;
        let line = mounted.wait_for_line("files mounted", START_LIMIT)?;
        if !line.contains(&format!("{:?}", self.by)) {
            return Err(format!("the kernel asks in another way: {line}").into());
        }
        self.mounted = Some(mounted);
        Ok(())
    }

    /// The directory of the files.
    pub(super) fn files(&self) -> PathBuf {
        self.folder.path().join(FILES)
    }

    /// A folder on this machine's disk, which no mount hides.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A server dies.
    pub(super) fn kill_server(&mut self, number: usize) -> Result<()> {
        Ok(self.servers[number].0.kill()?)
    }

    /// It is there again, without its memory.
    pub(super) fn start_server(&mut self, number: usize) -> Result<()> {
        let address = self.servers[number].1.clone();
        self.servers[number] = self.serve(&address)?;
        Ok(())
    }

    /// Whether all three copies are whole.
    pub(super) fn is_whole(&self) -> Result<bool> {
        let status = ["volume", "status", VOLUME, "--json", TOKEN, "token"];
        Ok(ended_well(self.program, self.folder.path(), &status)?.matches("\"state\":\"whole\"").count() == 3)
    }

    /// Unmounts the files and mounts them again: what is read then comes from the servers.
    pub(super) fn mount_again(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    fn unmount(&mut self) -> Result<()> {
        let Some(mut mounted) = self.mounted.take() else { return Ok(()) };
        mounted.signal(Signal::TERM)?;
        Ok(mounted.wait_for_success(START_LIMIT)?)
    }

    /// Ends all, and fails if the mount does not end well.
    pub(super) fn end(mut self) -> Result<()> {
        self.unmount()
    }

    /// Runs a command in the directory of the files. Returns what it says, on both streams; fails with its last lines.
    pub(super) fn run(&self, command: &mut Command) -> Result<String> {
        let ran = command.current_dir(self.files()).output();
        let name = command.get_program().to_string_lossy().into_owned();
        let ran =
            ran.map_err(|error| format!("the program {name}: {error}; call `make prove-files`, which installs it"))?;
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        if ran.status.success() {
            return Ok(said);
        }
        let last: Vec<&str> = said.lines().rev().take(LAST_LINES).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Err(format!("{name}: {}: {}", ran.status, last.join("\n")).into())
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        self.mounted = None;
        let _ = rustix::mount::unmount(self.files(), UnmountFlags::DETACH); // usually nothing is mounted there any more
    }
}

/// A program that `dev/lab/setup/setup --proofs` has put into the project's cache.
pub(super) fn built(name: &str) -> Command {
    Command::new(project_root().join(".cache/proofs/bin").join(name))
}

const VOLUME: &str = "files.volume";
const FILES: &str = "files";

/// Of the volume: a clone of this project, and what is built there. Each server has memory for it and its entries.
const SIZE: &str = "1GiB";
const MEMORY: &str = "1100MiB";

/// Of a program that fails.
const LAST_LINES: usize = 12;
