module remora.example/reader

go 1.21

require github.com/hdt3213/rdb v1.3.2
