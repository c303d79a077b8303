//! A primary with a source beside it, and commands that read from the source.

use remora_lab::{Agent, Server};

use super::{Source, Stage};

/// A primary, its source, and the stage of the commands that read from the source.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) primary: Server,
    pub(crate) source: Source,
}

impl Scene {
    /// Starts a source of the primary with these options.
    pub(crate) fn new(primary: Server, options: &[&str]) -> Scene {
        let stage = Stage::new();
        let source = stage.source(&primary.url(), options);
        Scene { stage, primary, source }
    }

    /// The arguments of a command that reads from the source and writes to this place.
    pub(crate) fn args(&self, command: &str, to: &str, more: &[&str]) -> Vec<String> {
        let (source, token) = (self.source.address.to_string(), self.source.token().display().to_string());
        let args = [command, "--source", &source, "--token-file", &token, "--to", to];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// Starts such a command.
    pub(crate) fn start(&self, command: &str, to: &str, more: &[&str]) -> Agent {
        self.stage.start(None, &strs(&self.args(command, to, more)))
    }
}

/// The same arguments, borrowed.
pub(crate) fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}
