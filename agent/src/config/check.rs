//! `remora config check`: whether a file's options are ones that the commands take.

use std::ffi::OsString;

use clap::error::ErrorKind;

use super::{File, Words};
use crate::args::{self, ConfigAction, ConfigArgs};
use crate::exit::{Code, Failure};
use crate::progress;

/// Runs `remora config`.
///
/// # Errors
/// The file cannot be read, or a command refuses what it says.
pub fn run(args: &ConfigArgs) -> Result<(), Failure> {
    let ConfigAction::Check { file } = &args.action;
    let definition = args::definition();
    let commands = File::read(file)?.commands(&definition);
    if commands.is_empty() {
        let text = format!("{} has options of no command: give them in tables such as [source]", file.display());
        return Err(Failure::new(Code::Usage, text));
    }
    let mut wrong = 0;
    for path in &commands {
        let name = path.join(" ");
        let mut words: Vec<OsString> = vec![definition.get_name().into()];
        words.extend(path.iter().map(OsString::from));
        words.extend(["--config".into(), file.into()]);
        // The environment of this shell is not that of the service.
        let words = Words::complete(&definition, words, |_| None)?;
        let count = match words.added.len() {
            1 => "1 option".to_owned(),
            count => format!("{count} options"),
        };
        match definition.clone().try_get_matches_from(&words.words) {
            Ok(_) => progress::print_line(&format!("remora {name}: {count}, complete"))?,
            // The rest may stand on the command line of the service.
            Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
                progress::print_line(&format!(
                    "remora {name}: {count}; the command line or the environment must add more:\n{}",
                    indented(&error.to_string())
                ))?;
            }
            Err(error) => {
                wrong += 1;
                let text = error.to_string();
                progress::say(&format!("remora {name}: {}", text.lines().next().unwrap_or_default()));
                progress::say(&format!("  {}", words.origins(&text)));
            }
        }
    }
    match wrong {
        0 => Ok(()),
        _ => Err(Failure::new(Code::Usage, format!("{} is not valid", file.display()))),
    }
}

/// The lines of an error that name what is missing.
fn indented(text: &str) -> String {
    let lines = text.lines().skip(1).take_while(|line| !line.is_empty());
    lines.map(|line| format!("  {}", line.trim())).collect::<Vec<_>>().join("\n")
}
