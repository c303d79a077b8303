//! The program that leads clients to the new primary.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Pause between two looks whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs the program with the addresses of the old and the new primary, and waits for its end. Its output is our stderr:
/// our stdout is for results.
///
/// # Errors
/// Why clients may not have been led there.
pub(super) async fn run(program: &Path, limit: Duration, (old, new): (&str, &str)) -> Result<(), String> {
    let named = format!("the hook {}", program.display());
    let mut command = Command::new(program);
    command.args([old, new]).stdin(Stdio::null()).stdout(std::io::stderr());
    let mut child = command.spawn().map_err(|error| format!("{named} could not be started ({error})"))?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("{named} has failed ({status})")),
            Err(error) => return Err(format!("{named} could not be waited for ({error})")),
            Ok(None) if Instant::now() >= until => {
                let _ = child.kill().and_then(|()| child.wait()); // it may have ended meanwhile
                let limit = limit.as_secs_f64();
                return Err(format!("{named} did not end within {limit} s and was killed (--hook-timeout)"));
            }
            Ok(None) => sleep(LOOK_EVERY).await,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    async fn ran(script: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hook");
        let mut file = std::fs::File::options().create_new(true).write(true).mode(0o755).open(&program).unwrap();
        file.write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).unwrap();
        drop(file);
        run(&program, Duration::from_millis(300), ("redis://a:1", "redis://b:2")).await
    }

    #[tokio::test]
    async fn it_gets_both_addresses_and_its_failure_is_told() {
        assert_eq!(ran(r#"test "$1 $2" = "redis://a:1 redis://b:2""#).await, Ok(()));
        assert!(ran("exit 3").await.unwrap_err().contains("has failed (exit status: 3)"));
        assert!(ran("exec sleep 60").await.unwrap_err().contains("--hook-timeout"));
        let missing = run(Path::new("/nowhere/hook"), Duration::from_secs(1), ("a", "b")).await;
        assert!(missing.unwrap_err().contains("could not be started"));
    }
}
