//! System calls that aya lacks: reading a hash map and writing an array in batches (`BPF_MAP_LOOKUP_BATCH` and
//! `BPF_MAP_UPDATE_BATCH`, Linux 5.6), a map in memory (`mmap`), waiting for a ring buffer, the descriptor of a pin (`BPF_OBJ_GET`), and program numbers on a hook
//! (`BPF_PROG_QUERY`). aya opens each program by number for the last one, which takes `CAP_SYS_ADMIN`; the numbers alone do
//! not.
//!
//! A batch copies whole buckets: a call returns `ENOSPC` where the buffer is smaller than a bucket, and the buffer doubles.
//! Entries that change during the walk may be missed or seen twice, as with any walk of a live map.

#![expect(unsafe_code, reason = "map access is one of the three places for it")]

use std::ffi::CString;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use aya::Pod;
use aya::maps::{MapData, RingBuf};
use aya::programs::TcAttachType;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use tokio::io::unix::AsyncFd;

use crate::error::map_io;
use egress_core::model::lease::LeaseCell;

const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_long = 26;
const FIRST_CHUNK: u32 = 1024;

const BPF_PROG_QUERY: libc::c_long = 16;
/// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
const TCX: [u32; 2] = [46, 47];
/// The kernel takes no more programs on one hook (`BPF_MPROG_MAX`).
const MOST_PROGRAMS: u32 = 64;

/// The part of `union bpf_attr` that batch commands use (linux/bpf.h).
#[repr(C, align(8))]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The part of `union bpf_attr` that `BPF_PROG_QUERY` uses (linux/bpf.h).
#[repr(C, align(8))]
struct QueryAttr {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    reserved: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The numbers of the TCX programs there, first to last. An error if the kernel has no TCX (`EINVAL`) or no such device.
pub fn tcx_programs(ifindex: u32, direction: TcAttachType) -> io::Result<Vec<u32>> {
    let [ingress, egress] = TCX;
    let mut numbers = [0_u32; MOST_PROGRAMS as usize];
    let mut attr = QueryAttr {
        target_ifindex: ifindex,
        attach_type: if direction == TcAttachType::Egress { egress } else { ingress },
        query_flags: 0,
        attach_flags: 0,
        prog_ids: numbers.as_mut_ptr() as u64,
        count: MOST_PROGRAMS,
        reserved: 0,
        prog_attach_flags: 0,
        link_ids: 0,
        link_attach_flags: 0,
        revision: 0,
    };
    // SAFETY: `attr` is the kernel's layout for this command and its size is given. The one pointer in it that is not null
    // is to a live array of `count` numbers, and the kernel writes at most as many.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut attr, size_of::<QueryAttr>() as libc::c_ulong) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(numbers.into_iter().take(attr.count as usize).collect())
}

/// Calls `visit` with every entry of a hash map (not a per-CPU one).
pub fn for_each<K: Pod, V: Pod>(fd: BorrowedFd<'_>, mut visit: impl FnMut(&K, &V)) -> io::Result<()> {
    let mut batches = Batches::of(fd.try_clone_to_owned()?)?;
    while batches.next(&mut visit)? {}
    Ok(())
}

/// A walk of a hash map (not a per-CPU one), one batch at a time.
pub struct Batches<K, V> {
    fd: OwnedFd,
    keys: Vec<MaybeUninit<K>>,
    values: Vec<MaybeUninit<V>>,
    /// Position of the last call; hash maps use four bytes of it.
    cursor: Option<u64>,
}

impl<K: Pod, V: Pod> Batches<K, V> {
    /// The kernel writes as many bytes as *it* believes a key and a value to have, so the map is asked for its sizes here.
    pub fn of(fd: OwnedFd) -> io::Result<Self> {
        let map = MapData::from_fd(fd.try_clone()?).map_err(map_io)?;
        let info = map.info().map_err(map_io)?;
        if info.key_size() as usize != size_of::<K>() || info.value_size() as usize != size_of::<V>() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Self { fd, keys: buffer(FIRST_CHUNK), values: buffer(FIRST_CHUNK), cursor: None })
    }

    /// Visits the next entries; false after the last ones.
    pub fn next(&mut self, mut visit: impl FnMut(&K, &V)) -> io::Result<bool> {
        loop {
            let chunk = u32::try_from(self.keys.len()).map_err(io::Error::other)?;
            match lookup(self.fd.as_fd(), &mut self.cursor, &mut self.keys, &mut self.values, chunk) {
                Ok((count, last)) => {
                    for (key, value) in self.keys.iter().zip(&self.values).take(count as usize) {
                        // SAFETY: the call succeeded, so the kernel has written the first `count` keys, and every bit
                        // pattern is a `K`, which is Pod.
                        let key = unsafe { key.assume_init_ref() };
                        // SAFETY: likewise for the first `count` values.
                        let value = unsafe { value.assume_init_ref() };
                        visit(key, value);
                    }
                    return Ok(!last);
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    let chunk = chunk.checked_mul(2).ok_or(error)?;
                    self.keys = buffer(chunk);
                    self.values = buffer(chunk);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Writes the first elements of an array.
pub fn write_array<V: Pod>(array: &MapData, values: &[V]) -> io::Result<()> {
    let info = array.info().map_err(map_io)?;
    if info.value_size() as usize != size_of::<V>() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let count = u32::try_from(values.len()).map_err(io::Error::other)?;
    let indexes: Vec<u32> = (0..count).collect();
    let mut attr = BatchAttr {
        in_batch: 0,
        out_batch: 0,
        keys: indexes.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count,
        map_fd: u32::try_from(array.fd().as_fd().as_raw_fd()).map_err(io::Error::other)?,
        elem_flags: 0,
        flags: 0,
    };
    // SAFETY: `attr` is the kernel's layout for this command and its size is given. The pointers in it are to `count` live
    // indexes and values, whose sizes are those of the array (a key of four bytes; the value's was compared above). The
    // kernel only reads them.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_MAP_UPDATE_BATCH, &raw mut attr, size_of::<BatchAttr>() as libc::c_ulong)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn buffer<T: Copy>(count: u32) -> Vec<MaybeUninit<T>> {
    vec![MaybeUninit::uninit(); count as usize]
}

/// Number of written entries, and whether they were the last.
fn lookup<K, V>(
    fd: BorrowedFd<'_>,
    cursor: &mut Option<u64>,
    keys: &mut [MaybeUninit<K>],
    values: &mut [MaybeUninit<V>],
    chunk: u32,
) -> io::Result<(u32, bool)> {
    debug_assert!(keys.len() >= chunk as usize && values.len() >= chunk as usize);
    let before = *cursor;
    let mut after = 0_u64;
    let mut attr = BatchAttr {
        in_batch: before.as_ref().map_or(0, |before| std::ptr::from_ref(before) as u64),
        out_batch: &raw mut after as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: chunk,
        map_fd: u32::try_from(fd.as_raw_fd()).map_err(io::Error::other)?,
        elem_flags: 0,
        flags: 0,
    };
    // SAFETY: `attr` is the kernel's layout for this command and its size is given. The pointers in it are to live local
    // variables of at least the cursor's size (four bytes) and to buffers of `chunk` keys and values, whose sizes the
    // caller has compared with the map's; the kernel writes at most `count` = `chunk` of each.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_BATCH, &raw mut attr, size_of::<BatchAttr>() as libc::c_ulong)
    };
    let error = io::Error::last_os_error();
    let last = result < 0 && error.raw_os_error() == Some(libc::ENOENT);
    if result < 0 && !last {
        return Err(error);
    }
    *cursor = Some(after);
    Ok((attr.count.min(chunk), last))
}

/// The only element of the map `lease`, a mappable array (`BPF_F_MMAPABLE`, Linux 5.5), in this process's memory: a store
/// of a word writes the map, and no reader sees part of it.
#[derive(Debug)]
pub struct MappedLease {
    page: NonNull<LeaseCell>,
}

// SAFETY: the page is mapped as long as this lives, whichever thread has it.
unsafe impl Send for MappedLease {}
// SAFETY: it is read and written as atomic numbers only.
unsafe impl Sync for MappedLease {}

impl MappedLease {
    /// The kernel maps whole pages, and an array has one at least.
    const LENGTH: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

    pub fn of(map: BorrowedFd<'_>) -> io::Result<Self> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses where, so nothing of this process is there, and it is unmapped by `drop` alone.
        let page = unsafe { mmap(None, Self::LENGTH, access, MapFlags::MAP_SHARED, map, 0) }?;
        // A page is aligned for every number.
        Ok(Self { page: page.cast() })
    }

    pub fn get(&self) -> &LeaseCell {
        // SAFETY: the page is mapped for as long as `self` is and begins with the array's first element, of the size of a
        // `LeaseCell` (asserted there; `dataplane::lease` takes no map of another). It is only ever accessed as atomic numbers
        // here; the kernel's programs read and write whole words.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for MappedLease {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `of`, and no reference outlives `self`.
        let _mapped = unsafe { munmap(self.page.cast(), Self::LENGTH.get()) };
    }
}

const BPF_OBJ_GET: libc::c_long = 7;

/// The part of `union bpf_attr` that `BPF_OBJ_GET` uses.
#[repr(C, align(8))]
struct ObjectAttr {
    pathname: u64,
    fd: u32,
    flags: u32,
}

/// Opens any pinned object.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr { pathname: path.as_ptr() as u64, fd: 0, flags: 0 };
    // SAFETY: `attr` is the kernel's layout for this command and its size is given; the path lives until the call is over.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw mut attr, size_of::<ObjectAttr>() as libc::c_ulong) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(result).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the ring buffer pollable. Must be called in a runtime.
pub fn await_ring(ring: RingBuf<MapData>) -> io::Result<AsyncFd<RingBuf<MapData>>> {
    // SAFETY: the ring buffer owns its descriptor, gives out that one only, and closes it when it is dropped, which
    // `AsyncFd` does after it has taken the descriptor out of the reactor.
    unsafe { AsyncFd::register(ring) }.map_err(io::Error::from)
}
