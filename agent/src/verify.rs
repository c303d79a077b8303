//! `remora verify`: compares two servers completely.
use crate::{cli::VerifyArgs, exit::Failure};
/// Runs `remora verify`.
pub async fn run(_args: VerifyArgs) -> Result<(), Failure> {
    Err(Failure::refused("this build has no verify"))
}
