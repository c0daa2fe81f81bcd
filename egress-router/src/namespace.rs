//! Network namespaces.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use egress_cni::{CniError, code};
use nix::sched::{CloneFlags, setns};

/// The calling thread's.
pub fn own() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

/// The namespace of a container.
///
/// # Errors
/// It is not there, or it is the node's own.
pub fn of_container(path: &Path, node: &File) -> Result<File, CniError> {
    let refused = |why: String| CniError::new(code::INVALID_NAMESPACE, format!("CNI_NETNS={}: {why}", path.display()));
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CniError::new(code::UNKNOWN_CONTAINER, format!("CNI_NETNS={} does not exist", path.display())));
        }
        Err(error) => return Err(refused(error.to_string())),
    };
    let number = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    match (number(&file), number(node)) {
        (Ok(pod), Ok(node)) if pod == node => Err(refused("it is the node's own namespace".to_owned())),
        (Ok(_), Ok(_)) => Ok(file),
        (Err(error), _) | (_, Err(error)) => Err(refused(error.to_string())),
    }
}

/// Moves the calling thread.
pub fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(setns(namespace, CloneFlags::CLONE_NEWNET)?)
}

/// Does something in a namespace, and comes back.
pub fn within<T>(namespace: &File, home: &File, work: impl FnOnce() -> T) -> io::Result<T> {
    enter(namespace.as_fd())?;
    let done = work();
    enter(home.as_fd())?;
    Ok(done)
}
