//! Messages that are text. A real service has messages of protobuf, and this in the code that
//! `tonic-prost-build` generates.

use bytes::{Buf, BufMut};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

#[derive(Clone, Copy, Debug)]
pub struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, message: String, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(message.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        match String::from_utf8(bytes.into()) {
            Ok(message) => Ok(Some(message)),
            Err(_) => Err(Status::invalid_argument("the message is no text")),
        }
    }
}
