//! Lists and removes filters of clsact queueing disciplines, over rtnetlink's tc messages.
//!
//! A device may have foreign filters and disciplines of any kind. An attribute that the library cannot decode is skipped, so
//! that it hides neither the filter nor the others.

use std::io;

use aya::programs::TcAttachType;
use rtnetlink::packet_core::{Emitable, NLM_F_ACK, NLM_F_DUMP, NlasIterator, ParseableParametrized};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption};

use crate::netlink::{self, NETLINK_ROUTE};

const CLSACT: &str = "clsact";
const CLSACT_HANDLE: TcHandle = TcHandle { major: TcHandle::CLSACT.major, minor: 0 };

/// A filter on one side of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub handle: u32,
    /// Priority and protocol.
    info: u32,
    /// Name and number of a BPF program.
    pub name: String,
    pub program: Option<u32>,
    /// The kernel's hash of its instructions.
    pub tag: Option<u64>,
}

impl Filter {
    pub const fn priority(&self) -> u16 {
        (self.info >> 16) as u16
    }

    /// Whether this is the other, or the entry without a handle that the kernel lists before all filters of its priority.
    pub fn comes_with(&self, other: &Self) -> bool {
        self == other || (self.handle == 0 && self.info == other.info)
    }
}

/// All filters there; none where the device or its discipline does not exist.
pub fn list(ifindex: u32, direction: TcAttachType) -> io::Result<Vec<Filter>> {
    let message = message(ifindex, TcHeader { parent: side(direction), ..TcHeader::default() })?;
    match netlink::request(NETLINK_ROUTE, NLM_F_DUMP, RouteNetlinkMessage::GetTrafficFilter(message)) {
        Ok(listed) => listed.iter().map(|content| filter(content)).collect(),
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Devices with a clsact discipline.
pub fn devices() -> io::Result<Vec<u32>> {
    let all = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let mut devices = Vec::new();
    for content in netlink::request(NETLINK_ROUTE, NLM_F_DUMP, all)? {
        let (header, attributes) = parse(&content)?;
        if attributes.iter().any(|attribute| matches!(attribute, TcAttribute::Kind(kind) if kind == CLSACT)) {
            devices.push(header.index.cast_unsigned());
        }
    }
    devices.dedup();
    Ok(devices)
}

/// Whether it existed.
pub fn remove(ifindex: u32, direction: TcAttachType, filter: &Filter) -> io::Result<bool> {
    let header =
        TcHeader { handle: filter.handle.into(), parent: side(direction), info: filter.info, ..TcHeader::default() };
    delete(RouteNetlinkMessage::DelTrafficFilter(message(ifindex, header)?))
}

/// Removes the discipline with all filters on it. Whether it existed.
pub fn remove_clsact(ifindex: u32) -> io::Result<bool> {
    let header = TcHeader { handle: CLSACT_HANDLE, parent: TcHandle::CLSACT, ..TcHeader::default() };
    delete(RouteNetlinkMessage::DelQueueDiscipline(message(ifindex, header)?))
}

fn message(ifindex: u32, header: TcHeader) -> io::Result<TcMessage> {
    let index = i32::try_from(ifindex).map_err(io::Error::other)?;
    Ok(TcMessage::from_parts(TcHeader { index, ..header }, Vec::new()))
}

const fn side(direction: TcAttachType) -> TcHandle {
    let minor = match direction {
        TcAttachType::Egress => TcHandle::MIN_EGRESS,
        TcAttachType::Ingress | TcAttachType::Custom(_) => TcHandle::MIN_INGRESS,
    };
    TcHandle { major: TcHandle::CLSACT.major, minor }
}

fn delete(message: RouteNetlinkMessage) -> io::Result<bool> {
    match netlink::request(NETLINK_ROUTE, NLM_F_ACK, message) {
        Ok(_) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// No such device, discipline or filter.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::EINVAL | libc::EOPNOTSUPP))
}

fn filter(content: &[u8]) -> io::Result<Filter> {
    let (header, attributes) = parse(content)?;
    let mut filter = Filter { handle: header.handle.into(), info: header.info, ..Filter::default() };
    for attribute in attributes {
        let TcAttribute::Options(options) = attribute else { continue };
        for option in options {
            match option {
                TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => filter.name = name,
                TcOption::Bpf(TcFilterBpfOption::ProgId(number)) => filter.program = Some(number),
                TcOption::Bpf(TcFilterBpfOption::ProgTag(tag)) => filter.tag = Some(u64::from_be_bytes(tag)),
                _ => {}
            }
        }
    }
    Ok(filter)
}

/// As `TcMessage` parses it, without the attributes that cannot be decoded.
fn parse(content: &[u8]) -> io::Result<(TcHeader, Vec<TcAttribute>)> {
    let header =
        TcHeader::parse(content).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    let mut kind = String::new();
    let mut attributes = Vec::new();
    for attribute in NlasIterator::new(content.get(header.buffer_len()..).unwrap_or_default()).flatten() {
        let Ok(attribute) = TcAttribute::parse_with_param(&attribute, kind.as_str()) else { continue };
        if let TcAttribute::Kind(name) = &attribute {
            kind.clone_from(name);
        }
        attributes.push(attribute);
    }
    Ok((header, attributes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emitted(attributes: Vec<TcAttribute>) -> Vec<u8> {
        let header = TcHeader { index: 7, handle: 0xe67e.into(), info: 1 << 16, ..TcHeader::default() };
        let message = TcMessage::from_parts(header, attributes);
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes);
        bytes
    }

    #[test]
    fn a_bpf_filter_has_a_name_a_program_and_a_tag() {
        let options = [
            TcFilterBpfOption::ProgName("from_pod".to_owned()),
            TcFilterBpfOption::ProgId(42),
            TcFilterBpfOption::ProgTag([0, 0xff, 0x5a, 0x0c, 0xc3, 0xd8, 0xd6, 0xb1]),
        ];
        let attributes = vec![
            TcAttribute::Kind("bpf".to_owned()),
            TcAttribute::Options(options.map(TcOption::Bpf).into_iter().collect()),
        ];
        let expected = Filter {
            handle: 0xe67e,
            info: 1 << 16,
            name: "from_pod".to_owned(),
            program: Some(42),
            tag: Some(0x00ff_5a0c_c3d8_d6b1),
        };
        let found = filter(&emitted(attributes)).expect("a message");
        assert_eq!((found.priority(), found), (1, expected));
    }

    #[test]
    fn a_foreign_filter_that_cannot_be_decoded_is_listed() {
        let bare = Filter { handle: 0xe67e, info: 1 << 16, ..Filter::default() };
        assert_eq!(filter(&emitted(Vec::new())).expect("a header"), bare);
        // The class of a u32 filter has four bytes.
        let mut bytes = emitted(vec![TcAttribute::Kind("u32".to_owned())]);
        bytes.extend([9, 0, 2, 0, 5, 0, 1, 0, 1, 0, 0, 0]);
        assert_eq!(filter(&bytes).expect("a header"), bare);
        assert!(
            TcAttribute::parse_with_param(
                &NlasIterator::new(&bytes[28..]).next().expect("options").expect("whole"),
                "u32"
            )
            .is_err()
        );
        assert!(filter(&[0; 19]).is_err(), "no header");
    }
}
