//! `remora load`: fills a server with test data.
use crate::{cli::LoadArgs, exit::Failure};
/// Runs `remora load`.
pub async fn run(_args: LoadArgs) -> Result<(), Failure> {
    Err(Failure::refused("this build has no load"))
}
