//! A file system that answers in threads of its own, in any order.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remora_fuse::Payload;
use remora_fuse::answer::Answer;
use remora_fuse::file_system::FileSystem;
use remora_fuse::reply::*;
use remora_fuse::request::*;

type Work = Box<dyn FnOnce() + Send>;

/// Another file system, whose calls are made by other threads.
pub struct Elsewhere {
    inner: Arc<dyn FileSystem>,
    work: Mutex<Sender<Work>>,
    /// How long a write takes.
    delay: Duration,
}

impl Elsewhere {
    pub fn new(inner: Arc<dyn FileSystem>, threads: usize) -> Elsewhere {
        let (work, todo) = channel::<Work>();
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..threads {
            let todo: Arc<Mutex<Receiver<Work>>> = Arc::clone(&todo);
            std::thread::spawn(move || {
                loop {
                    let work = todo.lock().unwrap().recv();
                    let Ok(work) = work else { return };
                    work();
                }
            });
        }
        Elsewhere { inner, work: Mutex::new(work), delay: Duration::ZERO }
    }

    pub fn with_slow_writes(self, delay: Duration) -> Elsewhere {
        Elsewhere { delay, ..self }
    }

    fn send(&self, work: impl FnOnce(&dyn FileSystem) + Send + 'static) {
        let inner = Arc::clone(&self.inner);
        self.work.lock().unwrap().send(Box::new(move || work(&*inner))).unwrap();
    }
}

/// Methods whose request is all numbers.
macro_rules! sent {
    ($($method:ident($asked:ty) -> $reply:ty;)*) => {$(
        fn $method(&self, asked: $asked, answer: Answer<'_, $reply>) {
            let later = answer.later();
            self.send(move |inner| later.answer_by(|answer| inner.$method(asked, answer)));
        }
    )*};
}

impl FileSystem for Elsewhere {
    sent! {
        get_attributes(GetAttributes) -> KnownAttributes;
        set_attributes(SetAttributes) -> KnownAttributes;
        read_link(u64) -> Target;
        open(Open) -> Opened;
        read(Read) -> Data;
        flush(Close) -> Done;
        release(Close) -> Done;
        fsync(Fsync) -> Done;
        open_directory(Open) -> Opened;
        read_directory(ReadDirectory) -> Listing;
        read_directory_plus(ReadDirectory) -> ListingPlus;
        release_directory(Close) -> Done;
        fsync_directory(Fsync) -> Done;
        statistics(u64) -> Statistics;
        allocate(Allocate) -> Done;
        seek(Seek) -> Position;
    }

    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| later.answer_by(|answer| inner.lookup(Lookup { parent, name: &name }, answer)));
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.inner.forget(node, lookups);
    }

    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        let (later, name, target) = (answer.later(), asked.name.to_vec(), asked.target.to_vec());
        let (parent, caller) = (asked.parent, asked.caller);
        self.send(move |inner| {
            let asked = Symlink { parent, name: &name, target: &target, caller };
            later.answer_by(|answer| inner.symlink(asked, answer));
        });
    }

    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let MakeNode { parent, caller, kind, permissions, device, umask, .. } = asked;
        self.send(move |inner| {
            let asked = MakeNode { parent, name: &name, caller, kind, permissions, device, umask };
            later.answer_by(|answer| inner.make_node(asked, answer));
        });
    }

    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let MakeDirectory { parent, caller, permissions, umask, .. } = asked;
        self.send(move |inner| {
            let asked = MakeDirectory { parent, name: &name, caller, permissions, umask };
            later.answer_by(|answer| inner.make_directory(asked, answer));
        });
    }

    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| later.answer_by(|answer| inner.unlink(Remove { parent, name: &name }, answer)));
    }

    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| {
            later.answer_by(|answer| inner.remove_directory(Remove { parent, name: &name }, answer))
        });
    }

    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        let (later, name, new_name) = (answer.later(), asked.name.to_vec(), asked.new_name.to_vec());
        let Rename { parent, new_parent, caller, how, leaves_whiteout, .. } = asked;
        self.send(move |inner| {
            let asked = Rename { parent, name: &name, new_parent, new_name: &new_name, caller, how, leaves_whiteout };
            later.answer_by(|answer| inner.rename(asked, answer));
        });
    }

    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        let (later, name, Link { node, parent, .. }) = (answer.later(), asked.name.to_vec(), asked);
        self.send(move |inner| later.answer_by(|answer| inner.link(Link { node, parent, name: &name }, answer)));
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let Create { parent, caller, permissions, umask, flags, drops_set_id, .. } = asked;
        self.send(move |inner| {
            let asked = Create { parent, name: &name, caller, permissions, umask, flags, drops_set_id };
            later.answer_by(|answer| inner.create(asked, answer));
        });
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let Write { node, handle, offset, data, is_from_cache, flags, drops_set_id } = asked;
        let (later, data, delay) = (answer.later(), data.into_bytes(), self.delay);
        self.send(move |inner| {
            std::thread::sleep(delay);
            let asked =
                Write { node, handle, offset, data: Payload::borrowed(&data), is_from_cache, flags, drops_set_id };
            later.answer_by(|answer| inner.write(asked, answer));
        });
    }
}
