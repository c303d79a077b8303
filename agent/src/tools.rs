//! The small commands around the job: `remora verify`, `remora token`, `remora module` and `remora generate`.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use remora_layout::search::{self, SearchError, Wanted};
use remora_layout::{folder, folder::FolderError};
use rustix::fs::OFlags;

use crate::args::{
    self, GenerateArgs, Generated, LayoutArgs, ModuleArgs, ModuleQuestion, TokenAction, TokenCommandArgs,
};
use crate::conversation::Identity;
use crate::exit::Failure;
use crate::progress;
use crate::signals::until_signal;

/// Runs `remora verify`, and prints the report, as JSON or as text.
///
/// # Errors
/// The servers differ, it could not be decided, or one of them does not answer.
pub async fn verify(options: remora_verify::Options, as_json: bool) -> Result<(), Failure> {
    let report = remora_verify::compare(&options).await?;
    let told = match as_json {
        true => progress::print_line(&report.json()),
        false => progress::print(&report.to_string()),
    };
    report.verdict().and(told)
}

// New tokens: `remora token new`.

/// Runs `remora token`.
///
/// # Errors
/// The file exists or cannot be written, stdout cannot be written, or the system gives no random bytes.
pub fn token(args: &TokenCommandArgs) -> Result<(), Failure> {
    let file = match &args.action {
        TokenAction::New { file } => file,
        TokenAction::Identity { file } => {
            let identity = Identity::new()?;
            write(file, identity.to_pem().trim_end())?;
            return print(&identity.public().to_string());
        }
    };
    let token = random()?;
    if file.as_os_str() == "-" {
        return print(&token);
    }
    write(file, &token)
}

fn print(text: &str) -> Result<(), Failure> {
    progress::print_line(text)
}

/// A new token: hexadecimal digits, which survive every editor, terminal and environment variable.
fn random() -> Result<String, Failure> {
    let mut random = [0; TOKEN_BYTES];
    getrandom::fill(&mut random)
        .map_err(|error| Failure::local(format!("the system gives no random bytes: {error}")))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Writes the token into a new file. A file, a symbolic link or a pipe at this path is left alone.
fn write(path: &Path, token: &str) -> Result<(), Failure> {
    let name = path.display();
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(MODE).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let mut file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::refused(format!(
            "{name} exists and is left alone: agents may use what is in it; choose another file, or remove this one first"
        )),
        _ => Failure::local(format!("cannot create the token file {name}: {error}")),
    })?;
    writeln!(file, "{token}").and_then(|()| file.sync_all()).map_err(|error| {
        // A part of a token must not be used.
        let _ = std::fs::remove_file(path);
        Failure::local(format!("cannot write the token file {name}: {error}"))
    })
}

/// Random bytes in a new token: no computer can try 2^256 of them.
const TOKEN_BYTES: usize = 32;

/// The mode of a new token file: its owner alone reads and writes it.
const MODE: u32 = 0o600;

// The server's module: where its library is, and layouts for it.

/// Runs `remora module`.
///
/// # Errors
/// The library is not found, no layout is found or it cannot be kept, or stdout cannot be written.
pub async fn module(args: &ModuleArgs) -> Result<(), Failure> {
    match &args.question {
        ModuleQuestion::Path => {
            let path = remora_server::module::library().map_err(|error| Failure::local(error.to_string()))?;
            progress::print_line(&path.display().to_string())
        }
        ModuleQuestion::Layout(args) => layout(args).await,
    }
}

/// Runs `remora module layout`.
async fn layout(args: &LayoutArgs) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut searching = {
        let (args, stop) = (args.clone(), stop.clone());
        tokio::task::spawn_blocking(move || search_layout(&args, &stop))
    };
    let ended = |error| Failure::local(format!("the search ended: {error}"));
    let found = async { (&mut searching).await.map_err(ended)? };
    let outcome = until_signal(found, ": nothing was kept").await;
    if outcome.is_err() {
        // The server that it has started must not stay behind: it is asked between two steps of the search.
        stop.store(true, Relaxed);
        if !searching.is_finished() {
            let _ = searching.await;
        }
    }
    let layout = outcome?;
    let path = folder::keep(&args.layouts, &layout.build, &layout.text).map_err(|error| match error {
        FolderError::Io { .. } => Failure::local(error.to_string()),
        _ => Failure::refused(error.to_string()),
    })?;
    progress::print_line(&format!(
        "{} ({}), family {}: functions named by {}\nkept in {}",
        layout.server,
        layout.build,
        layout.family.name(),
        layout.names.words(),
        path.display()
    ))
}

fn search_layout(args: &LayoutArgs, stop: &AtomicBool) -> Result<search::Layout, Failure> {
    // One program is server, checker of files and more, by the name by which it is called, and its file may have any of
    // them: Debian's redis-server is a link to redis-check-rdb. So it is called as the running server was.
    let (program, called) = match (&args.program, args.pid) {
        (Some(program), _) => (program.clone(), None),
        (None, Some(pid)) => {
            let link = PathBuf::from(format!("/proc/{pid}/exe"));
            let name = std::fs::read_link(&link)
                .and_then(|_| std::fs::read_to_string(format!("/proc/{pid}/comm")))
                .map_err(|error| Failure::local(format!("the program of process {pid} cannot be found: {error}; give --pid of a server that runs on this host, as its user or as root")))?;
            (link, Some(name.trim_end().into()))
        }
        (None, None) => return Err(Failure::local("neither --program nor --pid was given".to_owned())),
    };
    let wanted = Wanted { program: &program, called, debug_file: args.debug_file.as_deref(), stop };
    search::find(&wanted).map_err(|error| match error {
        SearchError::Names(_) | SearchError::Version(_) | SearchError::Differs { .. } | SearchError::Places(_) => {
            let text =
                format!("no layout for {}: {error}; the module works there without fast keys", program.display());
            Failure::refused(text)
        }
        // It names the program.
        SearchError::Server { .. } => Failure::local(format!(
            "{error}; give the program of a Redis or Valkey server, such as /usr/bin/redis-server"
        )),
        _ => Failure::local(format!("no layout for {}: {error}", program.display())),
    })
}

// Shell completions and man pages, made from the definition of the command line, so that they always agree with it.

/// Runs `remora generate`.
pub fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    match &args.what {
        Generated::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut args::definition(), NAME, &mut text);
            progress::print(&String::from_utf8_lossy(&text))
        }
        Generated::Man { directory } => write_man_pages(directory),
    }
}

fn write_man_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::local(format!("cannot write man pages to {}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(args::definition(), directory).map_err(failed)
}

const NAME: &str = "remora";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::conversation::Token;
    use crate::exit::Code;

    #[test]
    fn a_new_token_is_accepted_belongs_to_its_owner_alone_and_differs_from_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| {
            let path = folder.path().join(name);
            write(&path, &random().unwrap()).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
            Token::read_file(path).unwrap()
        });
        assert_ne!(one.bytes(), other.bytes());
        assert_eq!(one.bytes().len(), 2 * TOKEN_BYTES);
    }

    #[test]
    fn what_stands_at_the_path_is_neither_overwritten_nor_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, target] = ["file", "link", "target"].map(|name| folder.path().join(name));
        std::fs::write(&file, "the token in use").unwrap();
        // Planted by another user, who owns the file that the token would go to.
        std::os::unix::fs::symlink(&target, &link).unwrap();
        for path in [&file, &link] {
            let failure = write(path, "new").unwrap_err();
            assert_eq!(failure.code, Code::Refused, "{failure}");
            assert!(failure.message.contains(&path.display().to_string()), "{failure}");
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "the token in use");
        assert!(!target.exists());
    }

    #[test]
    fn a_folder_that_does_not_exist_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/token");
        let failure = write(&path, "new").unwrap_err();
        assert!(failure.message.contains(&path.display().to_string()), "{failure}");
    }

    #[test]
    fn there_is_a_man_page_for_every_command() {
        let folder = tempfile::tempdir().unwrap();
        write_man_pages(folder.path()).unwrap();
        for command in ["remora", "remora-source", "remora-replica", "remora-verify", "remora-load", "remora-status"] {
            let page = std::fs::read_to_string(folder.path().join(format!("{command}.1"))).unwrap();
            assert!(page.contains("Exit codes"), "{command}");
        }
    }

    #[test]
    fn completions_know_the_options() {
        let mut text = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut args::definition(), NAME, &mut text);
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("--token-file") && text.contains("--value-size"));
    }
}
