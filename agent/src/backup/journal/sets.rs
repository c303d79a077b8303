//! Sets: a snapshot and the commands since, in a folder or in an archive.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::super::archive::layout;
use super::super::archive::segments::{Limits, Segments};
use super::super::manifest::{Damaged, Kind, Manifest};
use super::super::rdb_file::RdbFile;
use super::super::shelf::Shelf;
use super::super::target::Target;
use super::files::Files;
use super::place::Place;
use super::recorder::Recorder;
use crate::args::BackupArgs;
use crate::exit::Failure;

/// A set without a name.
#[derive(Debug)]
pub(super) enum Beginning {
    Folder(Arc<Place>),
    Archive(Arc<Segments>),
}

/// When a file of commands is followed by another one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    file_size: u64,
    segment_every: Duration,
}

impl Sizes {
    pub(super) fn of(args: &BackupArgs) -> Sizes {
        Sizes { file_size: args.file_size.get(), segment_every: args.segment_every }
    }

    fn limits(self) -> Limits {
        Limits { age: self.segment_every, bytes: self.file_size }
    }
}

/// Goes on with the newest set, if there is one.
///
/// # Errors
/// It is there, and cannot be gone on with.
pub(super) fn resume(target: &Target, sizes: Sizes) -> Result<Option<(Manifest, Recorder)>, Failure> {
    match target {
        Target::Folder(shelf) => resume_folder(shelf, sizes),
        Target::Archive(archive) => {
            let all = layout::list(archive.store(), Damaged::Skipped)?;
            let Some(newest) = all.into_iter().rev().find(|backup| backup.kind == Kind::Journal) else {
                return Ok(None);
            };
            let reached = layout::reached(archive.store(), &newest.name)?;
            // Sent, and not counted: it comes again.
            let beyond = layout::segments(archive.store(), &newest.name)?;
            let beyond = beyond.into_iter().filter(|segment| segment.number > reached.segments);
            archive.store().remove(&beyond.map(|segment| segment.key).collect::<Vec<_>>())?;
            let segments = Segments::again(Arc::clone(archive), sizes.limits(), newest.name.clone(), reached.clone());
            let recorder = Recorder::go_on(Arc::new(segments), reached.offset, reached.database, reached.noted_seconds);
            Ok(Some((newest, recorder.map_err(|error| unusable(target, &error))?)))
        }
    }
}

fn resume_folder(shelf: &Shelf, sizes: Sizes) -> Result<Option<(Manifest, Recorder)>, Failure> {
    let all = shelf.list();
    let Some(newest) = all.into_iter().rev().find(|backup| backup.manifest.kind == Kind::Journal) else {
        return Ok(None);
    };
    let (place, path) = Place::reopen(&newest.path, sizes.file_size)?;
    let recorder = Recorder::resume(Arc::new(place), &path)?;
    Ok(Some((newest.manifest, recorder)))
}

fn unusable(target: &Target, error: &std::io::Error) -> Failure {
    Failure::local(format!("{target} cannot be used: {error}"))
}

/// Begins a set, behind a snapshot at this offset.
///
/// # Errors
/// Its first file cannot be made.
pub(super) fn begin(target: &Target, sizes: Sizes, offset: u64) -> Result<(Beginning, Recorder), Failure> {
    let failed = |error| unusable(target, &error);
    let (set, files): (Beginning, Arc<dyn Files>) = match target {
        Target::Folder(shelf) => {
            let place = Arc::new(Place::create(shelf.incoming_folder()?, sizes.file_size).map_err(failed)?);
            (Beginning::Folder(Arc::clone(&place)), place)
        }
        Target::Archive(archive) => {
            let segments = Arc::new(Segments::new(Arc::clone(archive), sizes.limits()));
            (Beginning::Archive(Arc::clone(&segments)), segments)
        }
    };
    Ok((set, Recorder::begin(files, offset).map_err(failed)?))
}

impl Beginning {
    /// Puts the snapshot that has arrived in, and gives the set its name. Returns the manifest with that name.
    ///
    /// # Errors
    /// Something cannot be written.
    pub(super) fn publish(&self, target: &Target, rdb: &RdbFile, manifest: &Manifest) -> Result<Manifest, Failure> {
        match (self, target) {
            (Beginning::Folder(place), Target::Folder(shelf)) => {
                let incoming: PathBuf = shelf.incoming_file();
                place.publish(&incoming, rdb, manifest, shelf.folder())
            }
            (Beginning::Archive(segments), _) => segments.publish(rdb, manifest),
            (Beginning::Folder(_), Target::Archive(_)) => {
                Err(Failure::local("a folder was begun for an archive; this is a bug of remora"))
            }
        }
    }
}
